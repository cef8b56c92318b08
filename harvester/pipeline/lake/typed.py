"""Registry-framed values as columns, read with the schemas with which they were written; `columns` decides how.

A schema is fetched once. It is kept next to the checkpoint before a batch is written with it, as are the ids that the
registry did not know at that time: so a repeated batch is split as the first time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for it
from pyspark.sql.types import DataType, StringType, StructType

from harvester.pipeline import schemas, tables
from harvester.pipeline.errors import ConnectorMismatch, InputMissing, PipelineError, RegistryUnavailable, TableMismatch
from harvester.pipeline.lake import columns, silver
from harvester.pipeline.schemas import Addition
from harvester.pipeline.store import TableStore

if TYPE_CHECKING:
    from confluent_kafka.schema_registry.error import SchemaRegistryError

_SERIALIZED = "serialized"
"""The format of a Protobuf schema as a descriptor of its file."""
_NOT_FOUND = (40401, 40402, 40403)
"""The registry's own codes. Any other 404 is of something that is no registry."""
_LARGEST = 2**31 - 1
"""The largest id of Confluent's registry, which does not take a larger one for an id at all. Others have such ids."""
_PASSING = (401, 403, 408, 429)
"""HTTP's statuses of requests that may succeed another time, with another login for example."""


@dataclass(frozen=True, slots=True)
class WrittenSchema:
    """A schema with which values were written. `kind`: AVRO, JSON or PROTOBUF. `refers`: it needs other schemas.

    `text` of PROTOBUF: the descriptor of its file, in base64. `imports`: those of the schemas to which it refers,
    directly or not, by the names under which they are imported; of other kinds none are asked for.
    """

    kind: str
    text: str
    refers: bool = False
    imports: Mapping[str, str] = field(default_factory=dict)


class SchemaRegistry:
    """Asks the registry each time. `options` are those of confluent_kafka's SchemaRegistryClient.

    Raises ValueError for wrong options, PipelineError if the client is not installed.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        try:
            from confluent_kafka.schema_registry import SchemaRegistryClient
        except ImportError as error:
            raise PipelineError(
                f"the client of the schema registry is not installed: {error}",
                hint="pip install 'outbox-harvester[spark,avro]'",
            ) from error
        try:
            # A client remembers a schema, but not in which format it asked for it.
            self._client, self._of_protobuf = (SchemaRegistryClient(dict(options)) for _ in range(2))
        except TypeError as error:
            raise ValueError(str(error)) from error
        self.url = re.sub(r"//[^/@]*@", "//", str(options["url"]))
        self.failure: RegistryUnavailable | None = None
        """The last one, which comes out of a stream as an error of Spark."""

    def schema(self, number: int) -> WrittenSchema | None:
        """The schema with this id, None if the registry has none. Raises RegistryUnavailable."""
        return self._asked(lambda client, format_: client.get_schema(number, fmt=format_), number)

    def latest(self, subject: str) -> WrittenSchema | None:
        """The latest schema of a subject. Otherwise as `schema`."""
        return self._asked(lambda client, format_: client.get_latest_version(subject, fmt=format_).schema)

    def _asked(self, ask: Callable[[Any, str | None], Any], number: int = 0) -> WrittenSchema | None:
        from confluent_kafka.schema_registry.error import SchemaRegistryError

        try:
            found, imports = ask(self._client, None), dict[str, str]()
            if found.schema_type == "PROTOBUF":
                found = ask(self._of_protobuf, _SERIALIZED)
                self._follow(found, imports)
        except Exception as error:  # HTTP, TLS, tokens and JSON have no common exception class
            if isinstance(error, SchemaRegistryError) and _is_missing(error, number):
                return None
            self.failure = RegistryUnavailable(
                f"the schema registry {self.url} gives no schemas: {error}",
                hint="nothing is lost: once it answers, start the job again; it continues where it stopped",
            )
            raise self.failure from error
        return WrittenSchema(found.schema_type or "AVRO", found.schema_str, bool(found.references), imports)

    def _follow(self, found: Any, imports: dict[str, str]) -> None:
        """Adds the schemas of Protobuf to which this one refers."""
        for one in found.references or ():
            if one.name not in imports:
                there = self._of_protobuf.get_version(one.subject, one.version, fmt=_SERIALIZED).schema
                imports[one.name] = str(there.schema_str)
                self._follow(there, imports)


def _is_missing(error: SchemaRegistryError, number: int) -> bool:
    """Whether the registry says that it has no such schema."""
    status = error.http_status_code
    is_no_id = number > _LARGEST and 400 <= status < 500 and status not in _PASSING
    return error.error_code in _NOT_FOUND or is_no_id


_MOST_IDS = 1000
"""Of a batch, so that garbage cannot occupy the registry for hours."""
_NO_AVRO = "AVRO_NOT_LOADED"
_TOLD = 300  # characters of an error of Spark
_STACK = re.compile(r"\n\s+at |\nJVM stacktrace")


class Schemas:
    """The schemas by id, and those ids that the registry did not know when it was asked for a batch."""

    def __init__(self, spark: SparkSession, checkpoint: str, registry: SchemaRegistry) -> None:
        self._spark, self._file, self.registry = spark, f"{checkpoint}/schemas.json", registry
        stored = json.loads(tables.read_text(spark, self._file) or '{"known": {}, "batch": null, "unknown": []}')
        self._known = {int(number): WrittenSchema(**schema) for number, schema in stored["known"].items()}
        self._batch: int | None = stored["batch"]
        self._unknown = set[int](stored["unknown"])

    def of(self, numbers: Collection[int], batch: int | None) -> dict[int, WrittenSchema | None]:
        """These schemas; None for one that does not exist. Raises RegistryUnavailable."""
        if batch is None or batch != self._batch:
            self._batch, self._unknown = batch, set()
        asked = sorted(set(numbers) - self._known.keys() - self._unknown)
        for number in asked:
            if (found := self.registry.schema(number)) is None:
                self._unknown.add(number)
            else:
                self._known[number] = found
        if asked:
            known = {number: asdict(schema) for number, schema in self._known.items()}
            kept = {"known": known, "batch": batch, "unknown": sorted(self._unknown)}
            tables.write_text(self._spark, self._file, json.dumps(kept))
        return {number: self._known.get(number) for number in numbers}


@dataclass(slots=True)
class TypedValues:
    """The framed values of a topic. `payload`: the columns of their table, which grow with the schemas if `grows`.

    `alone`: entered while the table grows, which does not succeed while it is compacted. `_types`: of each schema, the
    type of its values, or why it has none; a schema of Protobuf has several types of messages, by their place in it.
    """

    topic: str
    payload: StructType
    grows: bool
    store: TableStore
    written: Schemas
    alone: AbstractContextManager[object] = field(default_factory=nullcontext)
    _types: dict[tuple[int, bytes], StructType | str] = field(default_factory=dict)

    @property
    def table(self) -> str:
        return silver.payload_table(self.topic, self.payload).name

    def split(self, bronze: DataFrame, batch: int | None = None) -> tuple[DataFrame, DataFrame]:
        mine = bronze.where(F.col("topic") == self.topic).withColumn("_id", F.expr(columns.SCHEMA_ID))
        counts = mine.where("_id IS NOT NULL").groupBy("_id").count().orderBy(F.desc("count"), "_id")
        found = self.written.of([row["_id"] for row in counts.limit(_MOST_IDS).collect()], batch)
        is_json, is_protobuf = _is_of("JSON", found), _is_of("PROTOBUF", found)
        mine = mine.withColumn("_place", F.expr(f"CASE WHEN {is_protobuf} THEN {columns.MESSAGE_TYPE} END"))
        places = _places(mine, found)
        types = {
            (number, place): self._type(number, schema, place)
            for number, schema in sorted(found.items())
            for place in sorted(places.get(number, [columns.FIRST_TYPE]))
        }
        of_protobuf = _as_json(types, found) if places else F.lit(None).cast("string")
        as_text = f"CASE WHEN {is_json} THEN CAST({columns.CONTENT} AS STRING) ELSE _json END"
        rows = mine.withColumn("_json", of_protobuf)
        rows = silver.parsed(rows, self.topic, self.payload, as_text, self._spelled(types, found, places))
        data, why = [], ["WHEN value IS NULL THEN NULL", "WHEN _id IS NULL THEN 'no schema id precedes the value'"]
        for (number, place), kind in types.items():
            schema, told = found[number], "NULL"
            if isinstance(kind, str):
                told = schemas.text(kind)
            elif schema is not None and schema.kind == "AVRO":
                decoded, is_sound = columns.from_avro(columns.CONTENT, schema.text)
                name = f"_of_{number}"
                rows = rows.withColumn(name, F.expr(f"CASE WHEN _id = {number} THEN {decoded} END"))
                data.append(f"WHEN _id = {number} THEN {columns.projected(f'{name}.value', kind, self.payload)}")
                told = f"CASE WHEN {name}{is_sound} THEN NULL ELSE 'not of schema {number}' END"
            elif schema is not None and schema.kind == "PROTOBUF":
                told = f"CASE WHEN _json IS NULL THEN 'not of schema {number}' END"
            why.append(f"WHEN {_is_type(number, place, places)} THEN {told}")
        why.append(f"WHEN {is_protobuf} THEN concat('not of schema ', _id)")
        others = f"'its schema is not among the {_MOST_IDS:,} most frequent ones of the batch'"
        was_json, value = F.expr(f"{is_json} OR {is_protobuf}"), silver.values_of(self.payload)
        if data:
            value = F.when(was_json, value).otherwise(F.expr(f"CASE {' '.join(data)} END"))
        refusal = [F.expr(f"CASE {' '.join(why)} ELSE {others} END")]
        refusal.append(F.when(was_json & silver.misfit(self.payload), F.lit(f"not {self.payload.simpleString()}")))
        rows = rows.withColumn("_value", value)
        if (odd := silver.somewhere(F.col("_value"), self.payload, _odd)) is not None:
            refusal.append(F.when(odd, "text that is not UTF-8, or a time outside the years 1 to 9999"))
        rows = rows.withColumn("_detail", F.coalesce(*refusal))
        fitting = silver.fitting(rows.where("_detail IS NULL"), F.col("_value"))
        return fitting, silver.refused(rows.where("_detail IS NOT NULL"), F.col("_detail"))

    def _spelled(self, types: _Types, found: _Schemas, places: _Places) -> list[tuple[str, DataType]]:
        """Conditions for JSON text whose schema spells the columns in another case, which JSON distinguishes."""
        conditions, kinds = dict[str, list[str]](), dict[str, DataType]()
        for (number, place), kind in types.items():
            schema = found[number]
            if schema is not None and schema.kind != "AVRO" and not isinstance(kind, str):
                names = columns.respelled(self.payload, kind)
                kinds[names.simpleString()] = names
                conditions.setdefault(names.simpleString(), []).append(_is_type(number, place, places))
        conditions.pop(self.payload.simpleString(), None)
        return [(" OR ".join(some), kinds[name]) for name, some in conditions.items()]

    def _type(self, number: int, schema: WrittenSchema | None, place: bytes) -> StructType | str:
        """The type of such values, for which the table has grown if need be; or why they do not fit."""
        if schema is None:
            return f"the registry has no schema {number}"
        is_json, at = schema.kind == "JSON", (number, place)
        if at not in self._types:
            try:
                # JSON is read as the fixed columns, whatever else its schema says than how they are spelled.
                is_fixed = is_json and not self.grows
                known = self._as_spelled(schema) if is_fixed else type_of(self.store.spark, schema, place)
                self._types[at] = known
            except ValueError as error:
                self._types[at] = f"schema {number}: {error}"
        kind = self._types[at]
        if isinstance(kind, str):
            return kind
        payload, growth = columns.grown(self.payload, columns.storable(kind), may_widen=self.grows)
        if growth.problems and not is_json:
            return f"schema {number}: {'; '.join(growth.problems)}"
        if self.grows and (growth.added or growth.widened):
            changes = ([_in_data(one) for one in some] for some in (growth.added, growth.widened))
            with self.alone:
                self.store.grow(self.table, *changes)
            self.payload = payload
        return kind

    def _as_spelled(self, schema: WrittenSchema) -> StructType:
        """The columns in the spelling of a JSON Schema. Raises ValueError."""
        try:
            found = columns.from_json_schema(schema.text)
        except ValueError:
            return self.payload  # a schema that names no properties
        kind = columns.respelled(self.payload, found)
        assert isinstance(kind, StructType)
        return kind


_Schemas = Mapping[int, WrittenSchema | None]
_Types = Mapping[tuple[int, bytes], StructType | str]
_Places = Mapping[int, Collection[bytes]]


def _is_type(number: int, place: bytes, places: _Places) -> str:
    """A condition: the value is of this schema, and of this of its types if it has several."""
    return f"_id = {number}" + (f" AND _place = X'{place.hex()}'" if number in places else "")


def _is_of(kind: str, found: _Schemas) -> str:
    """A condition: the schema of a value is of this kind."""
    numbers = [str(number) for number, schema in found.items() if schema is not None and schema.kind == kind]
    return f"_id IN ({', '.join(numbers) or 'NULL'})"


def _places(mine: DataFrame, found: _Schemas) -> dict[int, list[bytes]]:
    """For each schema of Protobuf, the places of the message types that are there."""
    kinds = {number: schema.kind for number, schema in found.items() if schema is not None}
    places: dict[int, list[bytes]] = {number: [] for number, kind in kinds.items() if kind == "PROTOBUF"}
    if places:
        counts = mine.where("_place IS NOT NULL").groupBy("_id", "_place").count().orderBy(F.desc("count"), "_id")
        for row in counts.limit(_MOST_IDS).collect():
            places[row["_id"]].append(bytes(row["_place"]))
    return places


def _as_json(types: _Types, found: _Schemas) -> Column:
    """The JSON text of values that are Protobuf, of these types."""
    known, messages = dict[int, tuple[str, frozenset[bytes]]](), _messages()
    for (number, place), kind in types.items():
        schema = found[number]
        if schema is not None and schema.kind == "PROTOBUF" and not isinstance(kind, str):
            if number not in known:
                known[number] = messages.file_set(schema.text, schema.imports), frozenset[bytes]()
            files, places = known[number]
            known[number] = files, places | {place}
    # Of other rows, nothing: Python computes an expression for all rows, whatever condition surrounds it.
    return F.udf(messages.reader(known), "string")(F.when(F.col("_place").isNotNull(), F.col("value")))


def first_columns(store: TableStore, topic: str, registry: SchemaRegistry) -> StructType:
    """The columns of the topic's table; if it does not exist yet, those of the topic's latest schema.

    Raises InputMissing, TableMismatch, RegistryUnavailable.
    """
    name, subject = silver.payload_table(topic, StructType()).name, f"{topic}-value"
    if store.exists(name):
        return store.table(name).select("data.*").schema
    hint = f"name the columns: --typed '{topic}=total INT, …'"
    schema = registry.latest(subject)
    if schema is None:
        raise InputMissing(f"the schema registry {registry.url} has no subject {subject}", hint=hint)
    try:
        return columns.storable(type_of(store.spark, schema))
    except ValueError as error:
        raise TableMismatch(f"the latest schema of {subject} cannot be columns: {error}", hint=hint) from error


def _messages() -> ModuleType:
    try:
        from harvester.pipeline.lake import messages
    except ImportError as error:
        raise PipelineError(
            f"the library of Protobuf is not installed: {error}", hint="pip install 'outbox-harvester[spark,protobuf]'"
        ) from error
    return messages


def require_avro(spark: SparkSession) -> None:
    """Raises ConnectorMismatch if Spark has no connector for Avro."""
    _avro_type(spark, '"int"')


def type_of(spark: SparkSession, schema: WrittenSchema, place: bytes = columns.FIRST_TYPE) -> StructType:
    """The type of values written with this schema. Raises ValueError if they cannot be columns."""
    if schema.kind == "JSON":
        found: DataType = columns.from_json_schema(schema.text)
    elif schema.kind == "PROTOBUF":
        messages = _messages()
        found = messages.columns_of(messages.file_set(schema.text, schema.imports), place)
    elif schema.kind != "AVRO":
        raise ValueError(f"it is {schema.kind.title()}, whose values stay in silver as bytes")
    elif schema.refers:
        raise ValueError("it refers to other schemas")
    else:
        found = _avro_type(spark, schema.text)
    if not isinstance(found, StructType) or not columns.storable(found).names:
        raise ValueError(f"it is {found.simpleString()}, not a record with fields")
    silver.require_names(found)
    return found


def _avro_type(spark: SparkSession, schema: str) -> DataType:
    decoded, _ = columns.from_avro("CAST(NULL AS BINARY)", schema)
    try:
        return spark.range(0).select(F.expr(decoded).alias("it")).select("it.value").schema[0].dataType
    except (PySparkException, Py4JError) as error:
        said = " ".join(_STACK.split(str(error))[0].split())
        if _NO_AVRO in said:
            raise ConnectorMismatch(
                "Spark has no connector for Avro",
                hint="add org.apache.spark:spark-avro to its jars; `harvester pipeline packages --avro` lists it",
            ) from error
        raise ValueError(f"Spark cannot read it: {said[-_TOLD:]}") from error


def _in_data(one: Addition) -> Addition:
    return Addition(("data", *one.path), one.kind)


def _odd(value: Column, kind: DataType) -> Column | None:
    return ~F.is_valid_utf8(value) if isinstance(kind, StringType) else silver.beyond(value, kind)
