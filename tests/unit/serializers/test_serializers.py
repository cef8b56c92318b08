"""Serialisers, and the records that are made with them."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harvester.errors import RecordRejected, SerializationFailed
from harvester.record import OutboxRecord
from harvester.serializers import Bytes, CloudEvents, Json, Records, Serialized, Text
from harvester.serializers.msgspec import Msgspec

NOON = datetime(2026, 4, 5, 12, 0, tzinfo=UTC)
EVENTS = CloudEvents("/shop", now=lambda: NOON, new_id=lambda: "id-1")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@dataclasses.dataclass
class Order:
    total: int


class Shouting:
    """A serialiser of an application's own, with a header."""

    content_type = "text/loud"

    def __init__(self, header: str = "topic-was") -> None:
        self.header = header

    def serialize(self, topic: str, value: str) -> Serialized:
        return Serialized(value.upper(), ((self.header, topic),))


@given(JSON)
def test_json_is_read_back(value: Any) -> None:
    written = Json().serialize("t", value).value
    assert isinstance(written, str)
    assert json.loads(written) == value
    assert "\x00" not in written


def test_json_is_compact_and_in_order() -> None:
    value = {"b": [1, 2], "a": "ü"}
    assert Json().serialize("t", value) == Serialized('{"b":[1,2],"a":"ü"}')
    assert Json(sort_keys=True).serialize("t", value).value == '{"a":"ü","b":[1,2]}'
    assert Json(default=str).serialize("t", Decimal("1.50")).value == '"1.50"'


def test_plain_values_stay_as_they_are() -> None:
    assert Bytes().serialize("t", memoryview(b"\x00\xff")) == Serialized(b"\x00\xff")
    assert Text().serialize("t", "ü") == Serialized("ü")


def test_msgspec_writes_json_and_messagepack() -> None:
    assert Msgspec().serialize("t", Order(99)).value == b'{"total":99}'
    packed = Msgspec("msgpack").serialize("t", Order(99)).value
    assert isinstance(packed, bytes)
    assert msgspec.msgpack.decode(packed, type=Order) == Order(99)
    assert Msgspec(enc_hook=str).serialize("t", 1 + 2j).value == b'"(1+2j)"'
    assert (Msgspec().content_type, Msgspec("msgpack").content_type) == ("application/json", "application/msgpack")


CYCLE: list[Any] = []
CYCLE.append(CYCLE)


@pytest.mark.parametrize(
    ("serializer", "value"),
    [
        (Bytes(), "text"),
        (Text(), b"bytes"),
        (Json(), float("nan")),
        (Json(), {"a": {1}}),
        (Json(), CYCLE),
        (Msgspec(), 1 + 2j),
        (Msgspec("msgpack"), 2**80),
        (Msgspec(), CYCLE),
    ],
)
def test_what_cannot_be_written_is_an_error_of_ours(serializer: Any, value: Any) -> None:
    with pytest.raises(SerializationFailed):
        serializer.serialize("t", value)


def test_records_are_made_of_values() -> None:
    records = Records(Json())
    assert records.make("t", "k", {"a": 1}) == OutboxRecord("t", "k", '{"a":1}')
    assert records.make("t", None, None, headers=[("h", "v")], partition=3) == OutboxRecord(
        "t", None, None, (("h", "v"),), 3
    )
    assert records.make("t", "k", 0).value == "0"  # only None is a tombstone
    own = Records(Shouting()).make("t", "k", "hey", headers=[("a", "b")])
    assert own == OutboxRecord("t", "k", "HEY", (("a", "b"), ("topic-was", "t")))


def test_one_setting_makes_events_of_them() -> None:
    records = Records(Json(), cloud_events=dataclasses.replace(EVENTS, type="order", dataschema="urn:order"))
    made = records.make("t", "k", {}, headers=[("a", "b")])
    assert made.headers == (
        ("a", "b"),
        ("ce_specversion", "1.0"),
        ("ce_id", "id-1"),
        ("ce_source", "/shop"),
        ("ce_type", "order"),
        ("ce_time", "2026-04-05T12:00:00Z"),
        ("ce_dataschema", "urn:order"),
        ("content-type", "application/json"),
    )
    later = datetime(2027, 1, 1, tzinfo=UTC)
    named = dict(records.make("t", "k", {}, type="x", id="2", time=later, subject="s", extensions={"e": 1}).headers)
    assert named == dict(made.headers[1:]) | {
        "ce_id": "2",
        "ce_type": "x",
        "ce_time": "2027-01-01T00:00:00Z",
        "ce_subject": "s",
        "ce_e": "1",
    }
    # Without data there is no type of data.
    assert "content-type" not in dict(records.make("t", "k", None).headers)


def test_events_have_ids_of_their_own_by_default() -> None:
    records = Records(Json(), cloud_events=CloudEvents("/shop", "order"))
    made = [dict(records.make("t", "k", {}).headers) for _ in range(2)]
    assert made[0]["ce_id"] != made[1]["ce_id"]
    assert made[0]["ce_time"].endswith("Z")


def test_what_makes_no_event() -> None:
    records = Records(Json(), cloud_events=EVENTS)
    with pytest.raises(RecordRejected, match="type"):
        records.make("t", "k", {})
    for name in ("ce_id", "Content-Type"):
        with pytest.raises(RecordRejected, match="belongs to the CloudEvent"):
            records.make("t", "k", {}, type="x", headers=[(name, "mine")])
        with pytest.raises(RecordRejected, match="belongs to the CloudEvent"):
            Records(Shouting(name), cloud_events=EVENTS).make("t", "k", "v", type="x")
    with pytest.raises(RecordRejected, match="cloud_events was not"):
        Records(Json()).make("t", "k", {}, type="x")


def test_asyncio_s_needs_are_not_everybody_s() -> None:
    program = "import sys; sys.modules['greenlet'] = None; import harvester.writers.sqlalchemy"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_nothing_is_imported_that_was_not_asked_for() -> None:
    program = (
        "import sys, harvester.serializers, harvester.writers, harvester.outbox.stasher\n"
        "print(*{'asyncpg', 'confluent_kafka', 'django', 'fastavro', 'google', 'httpx2', 'msgspec', 'sqlalchemy'}"
        " & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
