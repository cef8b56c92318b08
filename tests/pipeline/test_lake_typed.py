"""Columns of what our serialisers write with a schema registry: evolution, rejects, and a registry that fails."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient
from google.protobuf.timestamp_pb2 import Timestamp

from harvester.errors import ExitCode
from harvester.origin import HEADER
from harvester.pipeline.errors import InputMissing, RegistryUnavailable, TableMismatch
from harvester.pipeline.formats import open_store
from harvester.pipeline.lake import silver
from harvester.pipeline.lake.batch import LakeBatch
from harvester.pipeline.lake.typed import SchemaRegistry, Schemas, TypedValues, WrittenSchema, first_columns
from harvester.pipeline.origin_columns import bronze_columns
from harvester.pipeline.schemas import Addition
from harvester.pipeline.session import DELTA, FORMAT, ICEBERG
from harvester.serializers.registry import avro, json_schema, protobuf
from tests.support.harvested import KEPT, Sent, Writer
from tests.support.lakes import Lake, make_lake
from tests.support.longs import is_nightly, long
from tests.support.registry import Registry, serving
from tests.support.shop import Shop
from tests.support.sparks import configure, kafka_rows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.conftest import MakeTopic
    from tests.support.servers import Servers

ORDER: dict[str, Any] = {
    "type": "record",
    "name": "Order",
    "fields": [
        {"name": "total", "type": "int"},
        {"name": "customer", "type": ["null", "string"], "default": None},
        {"name": "items", "type": {"type": "array", "items": {
            "type": "record", "name": "Item", "fields": [{"name": "sku", "type": "string"}]
        }}},
    ],
}  # fmt: skip
LATER: dict[str, Any] = {
    "type": "record",
    "name": "Order",
    "fields": [
        {"name": "note", "type": ["null", "string"], "default": None},
        {"name": "total", "type": "long"},
        {"name": "items", "type": {"type": "array", "items": {
            "type": "record", "name": "Item",
            "fields": [{"name": "sku", "type": "string"}, {"name": "n", "type": "int"}],
        }}},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
        {"name": "local", "type": {"type": "long", "logicalType": "local-timestamp-micros"}},
    ],
}  # fmt: skip
OTHER = {"type": "record", "name": "Order", "fields": [{"name": "total", "type": "string"}]}
OF_JSON = {
    "type": "object",
    "properties": {"total": {"type": "integer"}, "customer": {"type": ["string", "null"]}, "paid": {"type": "boolean"}},
}
HUGE = b"\xd8\xff\xff\xff\x0f"
"""A length or a count of 2**31 - 20, as Avro writes it. Allocated, it would end Spark's Java process."""
SHOUTED = {"type": "object", "properties": {
    "Total": {"type": "integer"},
    "ITEMS": {"type": "array", "items": {"type": "object", "properties": {"SKU": {"type": "string"}}}},
}}  # fmt: skip
MARCH = datetime(2026, 3, 1, tzinfo=UTC)


@pytest.fixture
def registry() -> Iterator[Registry]:
    with serving() as running:
        yield running


def asking(registry: Registry) -> SchemaRegistry:
    return SchemaRegistry({"url": registry.url, "max.retries": 0})


class Serialised:
    """Values of a topic as our serialisers write them."""

    def __init__(self, registry: Registry, topic: str) -> None:
        self._client, self._topic = SchemaRegistryClient({"url": registry.url}), topic

    def avro(self, schema: dict[str, Any], **value: Any) -> bytes:
        return self._bytes(avro(self._client, json.dumps(schema)), value)

    def json(self, schema: dict[str, Any], **value: Any) -> bytes:
        return self._bytes(json_schema(self._client, json.dumps({"title": "Order", **schema})), value)

    def protobuf(self, message: Any) -> bytes:
        return self._bytes(protobuf(self._client, type(message)), message)

    def _bytes(self, serializer: Any, value: Any) -> bytes:
        data = serializer.serialize(self._topic, value).value
        assert isinstance(data, bytes)
        return data


def test_framed_values_become_columns_that_grow_with_their_schemas(
    spark: SparkSession, servers: Servers, make_topic: MakeTopic, registry: Registry, tmp_path: Path
) -> None:
    lake, writer, topic = (
        Lake(spark, tmp_path / "lake", servers.bootstrap),
        Writer(servers.bootstrap),
        make_topic(1, KEPT),
    )
    lake.folds, values, settings = False, Serialised(registry, topic), {"registry": asking(registry)}
    typed: dict[str, Any] = {"typed": {topic: None}, **settings}
    with pytest.raises(InputMissing, match=f"no subject {topic}-value"):
        lake.once(topic, **typed)

    first = values.avro(ORDER, total=1, customer="ann", items=[{"sku": "a"}, {"sku": "b"}])
    writer.send(
        topic, [Sent(1, value=first), Sent(2, value=values.avro(ORDER, total=2, items=[])), Sent(3, value=None)]
    )
    assert lake.once(topic, **typed) == 3
    assert stored(lake, topic) == {
        1: {"total": 1, "customer": "ann", "items": [{"sku": "a"}, {"sku": "b"}]},
        2: {"total": 2, "customer": None, "items": []},
        3: None,
    }

    # A batch of everything: later schemas, an earlier one, other formats, and what cannot be read.
    moment = {"at": MARCH, "local": MARCH.replace(tzinfo=None)}
    grown = values.avro(LATER, note="x", total=2**40, items=[{"sku": "c", "n": 7}], **moment)
    strange = values.avro(OTHER, total="many")
    never = values.avro({**LATER, "doc": "as long"}, total=3, items=[], at=2**62, local=MARCH.replace(tzinfo=None))
    of_protobuf = values.protobuf(Timestamp(seconds=5))
    refused = {
        20: (b'{"total": 1}', "no schema id precedes the value"),
        21: (b"\0\0\0\0", "no schema id precedes the value"),
        22: (b"\0\0\0\1\xf4" + first[5:], "the registry has no schema 500"),
        23: (first[:-1], "not of schema 1"),
        24: (first + b"\0", "not of schema 1"),
        25: (first[:6] + b"\x02\x02\xff" + b"\0", "text that is not UTF-8, or a time outside the years 1 to 9999"),
        14: (first[:6] + b"\x02" + HUGE, "not of schema 1"),  # a customer of so many bytes
        15: (first[:6] + b"\0" + HUGE, "not of schema 1"),  # so many items
        26: (strange, f"schema {number_of(strange)}: total is string, not bigint"),
        27: (never, "text that is not UTF-8, or a time outside the years 1 to 9999"),
        28: (of_protobuf, f"schema {number_of(of_protobuf)}: it is timestamp, not a message with fields"),
        29: (values.json(OF_JSON, total=9, customer="x")[:-3], "not struct<"),
    }
    sent = {
        10: grown, 11: first, 12: values.json(OF_JSON, total=4, customer="bob", paid=True),
        13: values.json(SHOUTED, Total=5, ITEMS=[{"SKU": "d"}]),
        **{number: value for number, (value, _) in refused.items()},
    }  # fmt: skip
    registry.asked.clear()
    writer.send(topic, [Sent(number, value=value) for number, value in sent.items()])
    assert lake.once(topic, **typed) == len(sent)
    empty = {"note": None, "at": None, "local": None, "paid": None}
    data = stored(lake, topic)
    assert data.keys() == {1, 2, 3, 10, 11, 12, 13}
    assert data[10] == {
        "total": 2**40, "customer": None, "items": [{"sku": "c", "n": 7}], "note": "x", "paid": None,
        "at": MARCH.astimezone().replace(tzinfo=None), "local": MARCH.replace(tzinfo=None),
    }  # fmt: skip
    assert data[11] == data[1] == {
        **empty, "total": 1, "customer": "ann", "items": [{"sku": "a", "n": None}, {"sku": "b", "n": None}],
    }  # fmt: skip
    assert data[12] == {**empty, "total": 4, "customer": "bob", "paid": True, "items": None}
    assert data[13] == {**empty, "total": 5, "customer": None, "items": [{"sku": "d", "n": None}]}
    told = {bytes(row["value"]): row["detail"] for row in lake.rows("rejects", "value", "detail")}
    assert len(told) == len(refused)
    assert {number: told[value].startswith(reason) for number, (value, reason) in refused.items()} == dict.fromkeys(
        refused, True
    ), told
    # Once for each schema but the first one, and once more for Protobuf's descriptor.
    assert len(registry.asked) == len(set(registry.asked)) == 8

    _goes_on(lake, topic, registry, writer, values)


def test_messages_of_protobuf_become_columns(spark: SparkSession, registry: Registry, tmp_path: Path) -> None:
    root, values, shop, later = (
        make_lake(spark, tmp_path / "lake"), Serialised(registry, "orders"), Shop("INT32"), Shop("INT64"),
    )  # fmt: skip
    store, at = open_store(spark, root), f"{root}/checkpoint"
    order = shop.Order(total=1, state=1, big=2**64 - 1, raw=b"\xff", share=float("inf"), by={True: 3})
    order.items.add(sku="é")
    order.at.FromDatetime(MARCH + timedelta(microseconds=1))
    order.took.FromNanoseconds(-1_500_000_000)
    first = values.protobuf(order)
    payload = first_columns(store, "orders", asking(registry))
    store.prepare([silver.payload_table("orders", payload)], "test", HEADER)
    never, wide = shop.Order(), values.protobuf(later.Order(total=2**40, note="x"))
    never.at.seconds = 2**40
    refused = {
        first[:5] + b"\2\x82\1": f"schema {number_of(first)}: it has no message type at 028201",
        first[:5] + b"\xff": f"not of schema {number_of(first)}",
        first[:5]: f"not of schema {number_of(first)}",
        first[:-1]: f"not of schema {number_of(first)}",
        values.protobuf(never): "not struct<",
    }
    batches: list[list[bytes | None]] = [
        [first, values.protobuf(shop.Order()), None],
        [
            wide,
            values.protobuf(shop.Cancelled(why="late")),
            values.protobuf(shop.Order_Line(text="deep")),
            values.protobuf(shop.Far(Why="last")),
            *refused,
        ],
    ]
    for number, batch in enumerate(batches):
        rows = [
            {"headers": Sent(10 * number + one).written(), "value": value, "offset": 10 * number + one}
            for one, value in enumerate(batch, 1)
        ]
        typed = TypedValues("orders", payload, True, store, Schemas(spark, at, asking(registry)))
        LakeBatch(store, at, "test", HEADER, {"orders": typed}).write(bronze_columns(kafka_rows(spark, rows)), number)
        payload = typed.payload
    data = {row["id"]: row["data"] and row["data"].asDict(True) for row in store.table("json/orders").collect()}
    nothing: dict[str, Any] = dict.fromkeys(payload.names)
    empty = {**nothing, "total": 0, "items": [], "state": "NEW", "big": 0, "raw": b"", "by": {}, "share": 0.0}
    assert data == {
        1: {
            **empty, "total": 1, "items": [{"sku": "é"}], "took": Decimal("-1.5"), "state": "PAID",
            "at": (MARCH + timedelta(microseconds=1)).astimezone().replace(tzinfo=None),
            "big": Decimal(2**64 - 1), "raw": b"\xff", "share": float("inf"), "by": {"true": 3},
        },
        2: empty, 3: None, 11: {**empty, "total": 2**40, "note": "x"},
        12: {**nothing, "why": "late"}, 13: {**nothing, "text": "deep"}, 14: {**nothing, "why": "last"},
    }  # fmt: skip
    kinds = {name: payload[name].dataType.simpleString() for name in ("total", "why", "text")}
    assert kinds == {"total": "bigint", "why": "string", "text": "string"}
    told = {bytes(row["value"]): row["detail"] for row in store.table("rejects").collect()}
    assert {value: told[value].startswith(reason) for value, reason in refused.items()} == dict.fromkeys(refused, True)
    assert len(told) == len(refused)


def _goes_on(lake: Lake, topic: str, registry: Registry, writer: Writer, values: Serialised) -> None:
    """A registry that fails stops the batch and loses nothing; columns that are given later are filled in (by day
    test_columns_that_are_asked_for_after_a_first_batch_that_was_cut_off does so).
    """
    typed: dict[str, Any] = {"typed": {topic: None}, "registry": asking(registry)}
    before, schema = stored(lake, topic), {**ORDER, "doc": "a new one"}
    writer.send(topic, [Sent(30, value=values.avro(schema, total=30, items=[]))])
    registry.is_up = False
    with pytest.raises(RegistryUnavailable, match=f"the schema registry {registry.url} ") as caught:
        lake.once(topic, **typed)
    assert caught.value.exit_code is ExitCode.UNAVAILABLE
    assert stored(lake, topic) == before
    registry.is_up = True
    assert lake.once(topic, **typed) == 1
    assert stored(lake, topic)[30]["total"] == 30
    if not is_nightly():
        return

    writer.send(topic, [Sent(31, value=values.avro(ORDER, total=31, customer="eve", items=[]))])
    assert lake.once(topic) == 1
    assert 31 not in stored(lake, topic)
    rejected, said = len(lake.rows("rejects")), list[str]()
    given = {"typed": {topic: silver.from_ddl("customer STRING")}, "registry": asking(registry)}
    assert lake.once(topic, say=said.append, **given) == 0
    assert said == [f"filling in json/{topic} from silver"]
    assert stored(lake, topic)[31]["customer"] == "eve"
    assert len(lake.rows("rejects")) == rejected


def number_of(value: bytes) -> int:
    return int.from_bytes(value[1:5], "big")


def stored(lake: Lake, topic: str) -> dict[int, Any]:
    rows = lake.rows(f"json/{topic}", "id", "data")
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["id"]: row["data"] and row["data"].asDict(recursive=True) for row in rows}


@long
def test_a_repeated_batch_is_split_as_the_first_time_whatever_the_registry_has_learnt(
    spark: SparkSession, registry: Registry, tmp_path: Path
) -> None:
    root = make_lake(spark, tmp_path / "lake")
    store, at = open_store(spark, root), f"{root}/checkpoint"
    values = Serialised(registry, "orders")
    known, late = values.avro(ORDER, total=1, items=[]), values.avro({**ORDER, "doc": "late"}, total=2, items=[])
    of_json = values.json(OF_JSON, total=3)
    schema = registry.schemas.pop(number_of(late))
    payload = silver.from_ddl("Total INT")  # which all of them spell otherwise
    store.prepare([silver.payload_table("orders", payload)], "test", HEADER)
    rows = [
        {"headers": Sent(number).written(), "value": value} for number, value in enumerate((known, late, of_json), 1)
    ]

    def write(refused: str) -> None:
        def hit(here: str) -> None:
            if here == refused:
                raise InterruptedError(here)

        typed = TypedValues("orders", payload, False, store, Schemas(spark, at, asking(registry)))
        LakeBatch(store, at, "test", HEADER, {"orders": typed}, hit).write(bronze_columns(kafka_rows(spark, rows)), 0)

    with pytest.raises(InterruptedError):
        write("lake.rejects")
    registry.schemas[number_of(late)] = schema
    write("")
    written = store.table("json/orders").select("id", "data.Total").orderBy("id").collect()
    assert [tuple(row) for row in written] == [(1, 1), (3, 3)]
    told = [row["detail"] for row in store.table("rejects").select("detail").collect()]
    assert told == [f"the registry has no schema {number_of(late)}"]
    fresh = Schemas(spark, at, asking(registry))
    assert fresh.of([number_of(late)], 1)[number_of(late)] is not None, "a later batch asks again"


@pytest.mark.parametrize("format_", [DELTA, ICEBERG])
def test_tables_of_both_formats_grow(spark: SparkSession, tmp_path: Path, format_: str) -> None:
    configure(spark, {FORMAT: format_})
    try:
        store = open_store(spark, str(tmp_path / "lake"))
        before = "n INT, f FLOAT, d DECIMAL(5,2), items ARRAY<STRUCT<sku: STRING>>, by MAP<STRING, STRUCT<a: INT>>"
        table = silver.payload_table("orders", silver.from_ddl(before))
        store.prepare([table], "test", HEADER)
        added = {("items", "element", "n"): "INT", ("by", "value", "b"): "TIMESTAMP", ("local",): "TIMESTAMP_NTZ"}
        wider = {("n",): "BIGINT", ("f",): "DOUBLE", ("d",): "DECIMAL(9,2)", ("by", "value", "a"): "BIGINT"}
        changes = [
            [Addition(("data", *path), silver.from_ddl(f"it {kind}").fields[0].dataType) for path, kind in some.items()]
            for some in (added, wider)
        ]
        store.grow(table.name, *changes)
        after = (
            "n BIGINT, f DOUBLE, d DECIMAL(9,2), items ARRAY<STRUCT<sku: STRING, n: INT>>,"
            " by MAP<STRING, STRUCT<a: BIGINT, b: TIMESTAMP>>, local TIMESTAMP_NTZ"
        )
        assert store.table(table.name).select("data.*").schema.simpleString() == silver.from_ddl(after).simpleString()
    finally:
        configure(spark, {FORMAT: DELTA})


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"schema": '"string"'}, "it is string, not a record"),
        ({"schema": '{"type": "record", "name": "R", "fields": []}'}, "not a record with fields"),
        ({"schema": "{"}, "Expecting"),
        (
            {"schema": '{"type": "record", "name": "R", "fields": [{"name": "next", "type": ["null", "R"]}]}'},
            "recursive reference",
        ),
        (
            {"schema": '{"type": "record", "name": "R", "fields": ['
             '{"name": "a", "type": "int"}, {"name": "A", "type": "int"}]}'},
            "the same to Spark",
        ),
        ({"schema": '"int"', "references": [{"name": "R", "subject": "r", "version": 1}]}, "refers to other schemas"),
        ({"schema": '{"type": "array"}', "schemaType": "JSON"}, "no object with properties"),
        ({"schema": "syntax = \"proto3\";", "schemaType": "PROTOBUF"}, "the registry gives it as text only"),
    ],
)  # fmt: skip
def test_schemas_that_cannot_be_columns_are_refused_at_the_start(
    spark: SparkSession, registry: Registry, tmp_path: Path, schema: dict[str, Any], said: str
) -> None:
    registry.register("orders-value", schema)
    with pytest.raises(TableMismatch, match=f"latest schema of orders-value cannot be columns: .*{said}") as caught:
        first_columns(open_store(spark, str(tmp_path / "lake")), "orders", asking(registry))
    assert "--typed 'orders=" in (caught.value.hint or "")


def test_ids_that_are_too_large_for_confluents_registry_are_of_no_schema(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = asking(registry)
    assert (asked.schema(2**31 - 1), asked.schema(2**31), asked.schema(2**32 - 1)) == (None, None, None)
    registry.register("orders-value", {"schema": '"int"'}, 2**32 - 1)  # of a registry that gives out such ids
    assert asked.schema(2**32 - 1) == WrittenSchema("AVRO", '"int"')
    for status in (401, 403, 408, 429, 500):
        monkeypatch.setattr(registry, "answer", lambda *_, status=status: (status, {"error_code": status}))
        with pytest.raises(RegistryUnavailable):
            asked.schema(2**31)


def test_what_is_no_registry_is_not_taken_for_one_without_the_schema(registry: Registry) -> None:
    elsewhere = SchemaRegistry({"url": f"{registry.url}/some/path", "max.retries": 0})
    with pytest.raises(RegistryUnavailable, match="some/path"):
        elsewhere.schema(1)
    with pytest.raises(ValueError, match="url"):
        SchemaRegistry({})
    secret = SchemaRegistry({"url": "http://user:secret@127.0.0.1:1", "max.retries": 0})
    with pytest.raises(RegistryUnavailable) as caught:
        secret.schema(1)
    assert "secret" not in caught.value.message
