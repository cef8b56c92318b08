"""Avro, JSON Schema and Protobuf through the client's own registry in memory."""

from __future__ import annotations

import json
import uuid
from typing import Any

import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient, header_schema_id_serializer
from confluent_kafka.schema_registry.avro import AvroDeserializer
from confluent_kafka.schema_registry.json_schema import JSONDeserializer
from confluent_kafka.schema_registry.protobuf import ProtobufDeserializer
from confluent_kafka.serialization import MessageField, SerializationContext
from google.protobuf.timestamp_pb2 import Timestamp

from harvester.errors import RecordRejected, SerializationFailed
from harvester.outbox.sql.ddl import new_columns
from harvester.outbox.validation import check
from harvester.serializers import Records
from harvester.serializers.registry import RegistrySerializer, avro, json_schema, protobuf

ORDER = json.dumps({"type": "record", "name": "Order", "fields": [{"name": "total", "type": "int"}]})
ORDER_JSON = json.dumps({"title": "Order", "type": "object", "properties": {"total": {"type": "integer"}}})
VALUE = SerializationContext("orders", MessageField.VALUE)


@pytest.fixture
def registry() -> SchemaRegistryClient:
    return SchemaRegistryClient.new_client({"url": f"mock://{uuid.uuid4()}"})


def written(serializer: RegistrySerializer, value: Any, topic: str = "orders") -> bytes:
    data = serializer.serialize(topic, value).value
    assert isinstance(data, bytes)
    assert data[0] == 0  # the magic byte; behind it four bytes of the schema's id
    return data


def test_avro_is_read_back(registry: SchemaRegistryClient) -> None:
    data = written(avro(registry, ORDER), {"total": 99})
    assert AvroDeserializer(registry)(data, VALUE) == {"total": 99}
    assert registry.get_subjects() == ["orders-value"]


def test_json_schema_is_read_back(registry: SchemaRegistryClient) -> None:
    serializer = json_schema(registry, ORDER_JSON, to_dict=lambda total, _: {"total": total})
    assert JSONDeserializer(ORDER_JSON)(written(serializer, 99), VALUE) == {"total": 99}


def test_protobuf_is_read_back(registry: SchemaRegistryClient) -> None:
    data = written(protobuf(registry, Timestamp), Timestamp(seconds=5))
    assert ProtobufDeserializer(Timestamp, {})(data, VALUE) == Timestamp(seconds=5)


@pytest.mark.parametrize(("make", "schema"), [(avro, ORDER), (json_schema, ORDER_JSON)])
def test_what_the_schema_does_not_allow(registry: SchemaRegistryClient, make: Any, schema: str) -> None:
    with pytest.raises(SerializationFailed, match="'orders'") as caught:
        make(registry, schema).serialize("orders", {"total": "many"})
    assert caught.value.__cause__ is not None
    assert caught.value.hint


def test_a_schema_that_must_be_registered_before(registry: SchemaRegistryClient) -> None:
    serializer = avro(registry, ORDER, settings={"auto.register.schemas": False})
    with pytest.raises(SerializationFailed):
        serializer.serialize("orders", {"total": 1})
    assert registry.get_subjects() == []


def test_an_id_in_a_header_would_be_lost(registry: SchemaRegistryClient) -> None:
    serializer = avro(registry, ORDER, settings={"schema.id.serializer": header_schema_id_serializer})
    with pytest.raises(SerializationFailed, match="header"):
        serializer.serialize("orders", {"total": 1})


def test_the_outbox_has_to_take_bytes(registry: SchemaRegistryClient) -> None:
    record = Records(avro(registry, ORDER)).make("orders", "k", {"total": 99})
    assert check(record, new_columns("bytea")).value == record.value
    with pytest.raises(RecordRejected):
        check(record, new_columns("text"))
