"""What stands in a dead-letter topic says all of a record, whatever it was."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError
from hypothesis import given
from hypothesis import strategies as st

from harvester.coordination import dead_letters
from harvester.coordination.dead_letters import HEADER, DeadLetter, DeadLetterWriter, decode
from harvester.errors import BrokerError, BrokerUnavailable
from tests.support.inbox import stamped

BYTES = st.none() | st.binary(max_size=20)
LETTERS = st.builds(
    DeadLetter,
    group=st.text(), topic=st.text(), partition=st.integers(0, 9), offset=st.integers(0), key=BYTES, value=BYTES,
    headers=st.lists(st.tuples(st.sampled_from(["a", "ä", HEADER, "harvester"]), BYTES)),
    error=st.text(), attempts=st.integers(1), client=st.text(), timestamp_ms=st.none() | st.integers(0),
    failed_at_ms=st.integers(0),
)  # fmt: skip


@given(LETTERS.filter(lambda letter: b"more" not in (letter.key, letter.value)))
def test_what_is_written_is_read(letter: DeadLetter) -> None:
    key, value, headers = letter.encode()
    assert decode(value, headers) == letter
    assert key.decode().startswith(f"{letter.group}/{letter.place}/")
    assert key == replace(letter, error="another", attempts=1, client="another", failed_at_ms=1).letter_key
    changes: list[dict[str, Any]] = [{"value": b"more"}, {"key": b"more"}, {"headers": [("b", None)]}]
    assert key not in [replace(letter, **each).letter_key for each in [*changes, {"timestamp_ms": -1}]]
    assert headers[:-1] == letter.headers


def header(**changes: Any) -> tuple[str, bytes]:
    letter = DeadLetter(
        group="g", topic="t", partition=0, offset=1, key=None, value=b"v", headers=[], error="e", attempts=1,
        client="c", timestamp_ms=None, failed_at_ms=0,
    )  # fmt: skip
    about = json.loads(letter.encode()[2][-1][1] or b"") | changes
    return (HEADER, json.dumps(about).encode())


@pytest.mark.parametrize(
    ("value", "headers"),
    [
        (None, [header()]),  # settled
        (b"v", None),
        (b"v", [("other", b"1")]),
        (b"v", [(HEADER, b"no json")]),
        (b"v", [(HEADER, None)]),
        (b"v", [(HEADER, b"[]")]),
        (b"v", [header(key_base64="?")]),
        (b"v", [header(more=1)]),
    ],
)
def test_what_is_none_of_ours_is_passed_over(value: bytes | None, headers: Any) -> None:
    assert decode(value, headers) is None
    assert decode(b"v", [header()]) is not None


def test_headers_of_a_redriven_record_keep_the_origin_under_another_name() -> None:
    origin = stamped(7)
    letter = decode(b"v", [("harvester", b"o"), ("a", b"1"), ("x-outbox", origin), ("none", None), header()])
    assert letter is not None
    assert letter.redriven() == [
        ("harvester-origin", b"o"),
        ("a", b"1"),
        ("harvester-origin", origin),
        ("none", None),
    ]


@pytest.mark.parametrize(
    ("name", "passes", "hint"),
    [
        ("_MSG_TIMED_OUT", True, BrokerUnavailable.NO_ANSWER),
        ("_TRANSPORT", True, BrokerUnavailable.NO_ANSWER),
        ("NOT_ENOUGH_REPLICAS", True, "try again"),
        ("MSG_SIZE_TOO_LARGE", False, "max.message.bytes"),
        ("TOPIC_EXCEPTION", False, "settings"),
        ("TOPIC_AUTHORIZATION_FAILED", False, "write it"),
    ],
)
def test_a_letter_that_is_refused_for_good_is_not_called_a_broker_that_is_away(
    name: str, passes: bool, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first are retried; the others end the consumer."""

    class Refusing:
        def __init__(self, _options: Any) -> None: ...

        def produce(self, _topic: str, *, on_delivery: Any, **_: Any) -> None:
            on_delivery(KafkaError(getattr(KafkaError, name)), SimpleNamespace(offset=lambda: None))

    monkeypatch.setattr(dead_letters, "Producer", Refusing)
    letter = decode(b"v", [header()])
    assert letter is not None
    with pytest.raises(BrokerError) as caught:
        DeadLetterWriter("g.dead-letters", {}).send(letter)
    assert isinstance(caught.value, BrokerUnavailable) is passes
    assert hint in str(caught.value.hint)
