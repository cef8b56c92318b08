"""Avro, Protobuf and JSON Schema with a Schema Registry, in the framing that its deserialisers read.

    registry = SchemaRegistryClient({"url": "https://registry:8081"})
    orders = Records(avro(registry, SCHEMA))
    values = Values(read_avro(registry))

Each requires the extra of its name, and a BYTEA value in the outbox: values begin with a zero byte and the schema's id.
For the first value of a topic, the registry is contacted over HTTP: make the record before the transaction takes its
locks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.serialization import MessageField, SerializationContext

from harvester.errors import DeserializationFailed, SerializationFailed
from harvester.serializers.plain import Serialized

Settings = Mapping[str, Any]


def avro(
    client: SchemaRegistryClient,
    schema: str,
    *,
    to_dict: Callable[[Any, SerializationContext], dict[str, Any]] | None = None,
    settings: Settings | None = None,
) -> RegistrySerializer:
    """Values matching an Avro schema; `to_dict` makes dictionaries of others. `settings`: see AvroSerializer."""
    from confluent_kafka.schema_registry.avro import AvroSerializer

    return RegistrySerializer(AvroSerializer(client, schema, to_dict, dict(settings or {})), "application/avro")


def json_schema(
    client: SchemaRegistryClient,
    schema: str,
    *,
    to_dict: Callable[[Any, SerializationContext], dict[str, Any]] | None = None,
    settings: Settings | None = None,
) -> RegistrySerializer:
    """Values that a JSON schema allows; `to_dict` makes dictionaries of others. `settings`: see JSONSerializer."""
    from confluent_kafka.schema_registry.json_schema import JSONSerializer

    return RegistrySerializer(JSONSerializer(schema, client, to_dict, dict(settings or {})), "application/json")


def protobuf(
    client: SchemaRegistryClient, message: type[Any], *, settings: Settings | None = None
) -> RegistrySerializer:
    """Messages of one generated class. `settings`: see ProtobufSerializer."""
    from confluent_kafka.schema_registry.protobuf import ProtobufSerializer

    return RegistrySerializer(ProtobufSerializer(message, client, dict(settings or {})), "application/protobuf")


class RegistrySerializer:
    """Made by the functions above, or from any serialiser of confluent_kafka that takes (value, context)."""

    def __init__(self, write: Callable[[Any, SerializationContext], bytes | None], content_type: str) -> None:
        self.content_type = content_type
        self._write = write

    def serialize(self, topic: str, value: object) -> Serialized:
        """Write one value; contacts the registry for the first one of a topic."""
        context = SerializationContext(topic, MessageField.VALUE, [])
        try:
            written = self._write(value, context)
        except Exception as error:  # formats, rules and HTTP have no common exception class
            raise SerializationFailed(
                f"the value for topic {topic!r} does not fit its schema: {error}",
                hint="compare the value with the schema; if the registry could not be reached, try again",
            ) from error
        if context.headers:
            raise SerializationFailed(
                "the registry's serialiser writes the schema's id to a header, as bytes, which no text column can hold",
                hint="leave schema.id.serializer at its default, which puts it before the value",
            )
        if written is None:
            raise SerializationFailed(f"the registry's serialiser returned nothing for the value for topic {topic!r}")
        return Serialized(written)


def read_avro(
    client: SchemaRegistryClient,
    schema: str | None = None,
    *,
    from_dict: Callable[[dict[str, Any], SerializationContext], Any] | None = None,
    settings: Settings | None = None,
) -> RegistryDeserializer:
    """Values read with the schema they were written with, or with `schema`. `settings`: see AvroDeserializer."""
    from confluent_kafka.schema_registry.avro import AvroDeserializer

    return RegistryDeserializer(AvroDeserializer(client, schema, from_dict, conf=dict(settings or {})))


def read_json_schema(
    client: SchemaRegistryClient,
    schema: str | None = None,
    *,
    from_dict: Callable[[dict[str, Any], SerializationContext], Any] | None = None,
    settings: Settings | None = None,
) -> RegistryDeserializer:
    """Values allowed by their schema, or by `schema`. `settings`: see JSONDeserializer."""
    from confluent_kafka.schema_registry.json_schema import JSONDeserializer

    return RegistryDeserializer(JSONDeserializer(schema, from_dict, client, dict(settings or {})))


def read_protobuf(message: type[Any], *, settings: Settings | None = None) -> RegistryDeserializer:
    """Messages of one generated class, which requires no registry. `settings`: see ProtobufDeserializer."""
    from confluent_kafka.schema_registry.protobuf import ProtobufDeserializer

    return RegistryDeserializer(ProtobufDeserializer(message, dict(settings or {})))


class RegistryDeserializer:
    """Made by the functions above, or from any deserialiser of confluent_kafka that takes (data, context)."""

    def __init__(self, read: Callable[[bytes, SerializationContext], Any]) -> None:
        self._read = read

    def deserialize(self, topic: str, data: bytes) -> Any:
        """Read one value; contacts the registry for a schema that is not known yet."""
        try:
            return self._read(data, SerializationContext(topic, MessageField.VALUE))
        except Exception as error:  # formats, rules and HTTP have no common exception class
            raise DeserializationFailed(
                f"the value cannot be read with its schema: {error}",
                hint="it may have been written without the registry; if that could not be reached, try again",
            ) from error
