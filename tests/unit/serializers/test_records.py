"""The headers of CloudEvents: the rules of the specification, one by one."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from harvester.errors import RecordRejected
from harvester.serializers.records import cloud_event_headers, uri_reference

NOON = datetime(2026, 4, 5, 12, 0, tzinfo=UTC)
LEAST: dict[str, Any] = {"id": "1234-1234-1234", "source": "/mycontext/subcontext", "type": "com.example.someevent"}


def headers(**attributes: Any) -> dict[str, str]:
    pairs = cloud_event_headers(**{**LEAST, **attributes})
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


def test_the_example_of_the_binding() -> None:
    """Section 3.2.5 of the Kafka Protocol Binding."""
    time = datetime(2018, 4, 5, 3, 56, 24, tzinfo=UTC)
    assert headers(time=time, datacontenttype="application/avro") == {
        "ce_specversion": "1.0",
        "ce_type": "com.example.someevent",
        "ce_source": "/mycontext/subcontext",
        "ce_id": "1234-1234-1234",
        "ce_time": "2018-04-05T03:56:24Z",
        "content-type": "application/avro",
    }


def test_the_least_and_the_most() -> None:
    assert list(headers()) == ["ce_specversion", "ce_id", "ce_source", "ce_type"]
    everything = headers(
        time=NOON, subject="s", datacontenttype="a/b", dataschema="urn:x", extensions={"b": 1, "a": True}
    )
    assert list(everything)[4:] == ["ce_time", "ce_subject", "ce_dataschema", "ce_a", "ce_b", "content-type"]


@pytest.mark.parametrize("text", ["50 % off", "ünïcode ☃", "a%20b", '"quoted"', "𝄞"])
def test_values_are_utf_8_and_nothing_is_percent_encoded(text: str) -> None:
    """Section 3.2.3: header values are UTF-8 strings. Percent-encoding is the HTTP binding's."""
    assert headers(id=text, type=text, subject=text, extensions={"x": text}) == headers() | {
        "ce_id": text,
        "ce_type": text,
        "ce_subject": text,
        "ce_x": text,
    }


@pytest.mark.parametrize(
    ("given", "reference"),
    [
        ("/cloudevents/spec/pull/123", "/cloudevents/spec/pull/123"),
        ("https://github.com/cloudevents", "https://github.com/cloudevents"),
        ("mailto:cncf-wg-serverless@lists.cncf.io", "mailto:cncf-wg-serverless@lists.cncf.io"),
        ("urn:uuid:6e8bc430-9c3a-11d9-9669-0800200c9a66", "urn:uuid:6e8bc430-9c3a-11d9-9669-0800200c9a66"),
        ("1-555-123-4567", "1-555-123-4567"),
        ("http://[::1]:80/a[1]?b=[2]#c#d", "http://[::1]:80/a%5B1%5D?b=%5B2%5D#c%23d"),
        ("/shop ü", "/shop%20%C3%BC"),
        ("/100%", "/100%25"),
        ("/a%2Fb", "/a%2Fb"),
        ('/<a>"{b}"|\\^`', "/%3Ca%3E%22%7Bb%7D%22%7C%5C%5E%60"),
    ],
)
def test_a_source_is_a_uri_reference(given: str, reference: str) -> None:
    assert uri_reference(given) == reference
    assert headers(source=given)["ce_source"] == reference


@pytest.mark.parametrize(
    ("time", "text"),
    [
        (NOON, "2026-04-05T12:00:00Z"),
        (NOON.replace(microsecond=5), "2026-04-05T12:00:00.000005Z"),
        (NOON.astimezone(timezone(timedelta(hours=-3, minutes=-30))), "2026-04-05T12:00:00Z"),
        (NOON.astimezone(timezone(timedelta(minutes=53, seconds=28))), "2026-04-05T12:00:00Z"),
    ],
)
def test_times_are_of_rfc_3339(time: datetime, text: str) -> None:
    assert headers(time=time, extensions={"seen": time}) == headers() | {"ce_time": text, "ce_seen": text}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "true"),
        (False, "false"),
        (-(2**31), "-2147483648"),
        (2**31 - 1, "2147483647"),
        (b"\xff\x00", "/wA="),
        ("", ""),
    ],
)
def test_canonical_text_of_extensions(value: Any, text: str) -> None:
    assert headers(extensions={"x9": value})["ce_x9"] == text


BAD: dict[str, dict[str, Any]] = {
    "no id": {"id": ""},
    "no source": {"source": ""},
    "no type": {"type": ""},
    "an id that is no text": {"id": 1},
    "an empty subject": {"subject": ""},
    "a control character": {"subject": "a\nb"},
    "a C1 control": {"subject": "\x85"},
    "a lone surrogate": {"id": "\ud800"},
    "a noncharacter": {"type": "\uffff"},
    "a noncharacter beyond": {"type": "\U0010fffe"},
    "a naive time": {"time": datetime(2026, 4, 5)},  # noqa: DTZ001
    "not a media type": {"datacontenttype": "json"},
    "a relative schema": {"dataschema": "/schema"},
    "an upper-case name": {"extensions": {"traceParent": "x"}},
    "a name with a dash": {"extensions": {"trace-parent": "x"}},
    "an empty name": {"extensions": {"": "x"}},
    "a name of the specification": {"extensions": {"id": "x"}},
    "data": {"extensions": {"data": "x"}},
    "a large number": {"extensions": {"x": 2**31}},
    "a small number": {"extensions": {"x": -(2**31) - 1}},
    "a float": {"extensions": {"x": 1.5}},
    "None": {"extensions": {"x": None}},
}


@pytest.mark.parametrize("why", list(BAD))
def test_what_is_refused(why: str) -> None:
    with pytest.raises(RecordRejected, match="CloudEvents attribute"):
        headers(**BAD[why])
