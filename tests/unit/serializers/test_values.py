"""Values are read back as they were written; what cannot be read is named."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import uuid
from dataclasses import dataclass
from inspect import iscoroutinefunction
from typing import Any

import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient
from google.protobuf.timestamp_pb2 import Timestamp
from hypothesis import given
from hypothesis import strategies as st

from harvester.errors import DeserializationFailed
from harvester.serializers import Bytes, Json, Text, Values
from harvester.serializers.msgspec import Msgspec
from harvester.serializers.registry import (
    RegistryDeserializer,
    avro,
    json_schema,
    protobuf,
    read_avro,
    read_json_schema,
    read_protobuf,
)

ORDER = json.dumps({"type": "record", "name": "Order", "fields": [{"name": "total", "type": "int"}]})
ORDER_JSON = json.dumps({"title": "Order", "type": "object", "properties": {"total": {"type": "integer"}}})
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@dataclass
class Consumed:
    """A message."""

    data: bytes | None

    def topic(self) -> str:
        return "orders"

    def partition(self) -> int:
        return 3

    def offset(self) -> int:
        return 41

    def value(self) -> bytes | None:
        return self.data


@dataclasses.dataclass
class Order:
    total: int


def back(codec: Any, value: Any, reader: Any = None) -> Any:
    written = codec.serialize("orders", value).value
    data = written.encode() if isinstance(written, str) else written
    return Values(reader or codec).of(Consumed(data))


@given(JSON)
def test_json_is_read_back(value: Any) -> None:
    assert back(Json(), value) == value


@given(st.binary(), st.text())
def test_bytes_and_text_are_read_back(data: bytes, text: str) -> None:
    assert back(Bytes(), data) == data
    assert back(Text(), text) == text


@pytest.mark.parametrize("encoding", ["json", "msgpack"])
def test_msgspec_reads_a_type(encoding: Any) -> None:
    assert back(Msgspec(encoding, type=Order), Order(99)) == Order(99)
    assert back(Msgspec(encoding), Order(99)) == {"total": 99}


def test_what_a_registry_knows_is_read_back() -> None:
    registry = SchemaRegistryClient.new_client({"url": f"mock://{uuid.uuid4()}"})
    assert back(avro(registry, ORDER), {"total": 99}, read_avro(registry)) == {"total": 99}
    to_order = read_avro(registry, from_dict=lambda found, _: Order(**found))
    assert back(avro(registry, ORDER), {"total": 99}, to_order) == Order(99)
    reader = read_json_schema(registry, ORDER_JSON)
    assert back(json_schema(registry, ORDER_JSON), {"total": 99}, reader) == {"total": 99}
    sent = Timestamp(seconds=5)
    assert back(protobuf(registry, Timestamp), sent, read_protobuf(Timestamp)) == sent


def readers() -> list[Any]:
    registry = SchemaRegistryClient.new_client({"url": f"mock://{uuid.uuid4()}"})
    return [
        Text(), Json(), Msgspec("json"), Msgspec("msgpack"), Msgspec(type=Order), read_avro(registry),
        read_json_schema(registry, ORDER_JSON), read_protobuf(Timestamp),
    ]  # fmt: skip


@pytest.mark.parametrize("reader", readers(), ids=lambda reader: type(reader).__name__)
def test_what_cannot_be_read_is_named(reader: Any) -> None:
    with pytest.raises(DeserializationFailed, match=r"orders\[3\]@41: .*") as caught:
        Values(reader).of(Consumed(b"\xc1\xff"))
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize("text", [b"NaN", b'{"a": Infinity}', b"[" * 100_000])
def test_what_is_no_json_though_python_reads_it(text: bytes) -> None:
    with pytest.raises(DeserializationFailed):
        Values(Json()).of(Consumed(text))


def test_a_deserialiser_is_told_the_topic_and_never_asked_about_a_tombstone() -> None:
    asked: list[Any] = []
    values = Values(RegistryDeserializer(lambda data, context: asked.append((data, context.topic))))
    assert values.of(Consumed(None)) is None
    assert asked == []
    values.of(Consumed(b"v"))
    assert asked == [(b"v", "orders")]


def test_a_handler_is_given_value_and_record() -> None:
    record = Consumed(b"[1]")
    assert Values(Json()).handler(lambda value, given: (value, given))(record) == ([1], record)

    async def handle(value: Any, given: Any) -> Any:
        return value, given

    handler: Any = Values(Json()).handler(handle)
    assert iscoroutinefunction(handler)
    assert asyncio.run(handler(record)) == ([1], record)
