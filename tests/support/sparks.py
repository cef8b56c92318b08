"""Spark for tests: small, quick to start, and what tables and frames are compared with."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# Without the second compiler Java reserves 48 MB for compiled code, which Spark fills within a minute; then no more is
# compiled.
_JAVA = "-XX:+UseSerialGC -XX:ReservedCodeCacheSize=256m"
# The second compiler does not pay within one test: it takes most of the two cores for the first minutes.
_BRIEF = f"{_JAVA} -XX:TieredStopAtLevel=1"

SMALL = {
    "spark.driver.memory": "1g",
    "spark.driver.extraJavaOptions": _BRIEF,
    "spark.executor.extraJavaOptions": _BRIEF,
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.ui.enabled": "false",
    "spark.sql.ui.explainMode": "simple",
    "spark.sql.shuffle.partitions": "2",
    "spark.databricks.delta.snapshotPartitions": "1",
}

LASTING = {"spark.driver.extraJavaOptions": _JAVA}
"""For a Spark that many tests share: plans are made in half of the time once Java has compiled their making well."""

# To compile a query takes longer than to answer it, where there are a few rows.
INTERPRETED = {
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.adaptive.enabled": "false",
}
_COMPILED = {
    "spark.sql.codegen.wholeStage": "true",
    "spark.sql.codegen.factoryMode": "FALLBACK",
    "spark.sql.adaptive.enabled": "true",
}


def arguments(settings: Mapping[str, str]) -> list[str]:
    """The settings as spark-submit, and our jobs, take them."""
    return [part for name, value in settings.items() for part in ("--conf", f"{name}={value}")]


@contextmanager
def names_remembered() -> Iterator[None]:
    """Each name of Java is asked for once.

    PySpark asks for its own again with every column and every list of them, and each time Java looks through all jars:
    a tenth of what a batch costs.
    """
    from py4j.java_gateway import JavaClass, JavaMember, JavaPackage, JVMView

    def remembering(ask: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
        def remembered(self: Any, name: str) -> Any:
            found = ask(self, name)
            if isinstance(found, JavaPackage | JavaClass | JavaMember):  # a field may change
                self.__dict__[name] = found
            return found

        return remembered

    with ExitStack() as patched:
        for kind in (JVMView, JavaPackage, JavaClass):
            patched.enter_context(mock.patch.object(kind, "__getattr__", remembering(kind.__getattr__)))
        yield


@contextmanager
def compiled(spark: SparkSession) -> Iterator[None]:
    """Queries are compiled, and planned anew while they run, as in production; for as long as this lasts."""
    configure(spark, _COMPILED)
    try:
        yield
    finally:
        configure(spark, INTERPRETED)


def configure(spark: SparkSession, settings: Mapping[str, str]) -> None:
    """Of this session, and of those that are made from now on."""
    of_new_ones: Any = spark.sparkContext._jsc.sc().conf()
    for name, value in settings.items():
        spark.conf.set(name, value)
        of_new_ones.set(name, value)


Row = Mapping[str, Any]


def assert_rows(frame: DataFrame, expected: Sequence[Row]) -> None:
    """The rows are these, in any order and each as often; of the frame the columns that `expected` names."""
    wanted = [_line(row) for row in expected]
    columns = list(expected[0]) if expected else []
    found = [_line({name: row[name] for name in columns}) for row in frame.select(*columns or frame.columns).collect()]
    difference = list(difflib.unified_diff(sorted(wanted), sorted(found), "expected", "found", lineterm="", n=0))
    assert not difference, "\n" + "\n".join(difference)


def assert_same_columns(frame: DataFrame, schema: Any) -> None:
    """Names, types and order; whether NULL may stand there is no part of a table's contract."""
    found = [(field.name, field.dataType.simpleString()) for field in frame.schema]
    assert found == [(field.name, field.dataType.simpleString()) for field in schema]


def kafka_rows(spark: SparkSession, rows: Iterable[Row]) -> DataFrame:
    """Rows as Spark's Kafka source gives them; what a row does not say has a default, offsets count up."""
    from harvester.pipeline import schemas

    made = []
    for offset, row in enumerate(rows):
        defaults = {
            "key": b"key", "value": b"value", "topic": "orders", "partition": 0, "offset": offset, "timestampType": 0,
            "timestamp": datetime(2026, 3, 1, tzinfo=UTC), "headers": None,
        }  # fmt: skip
        made.append(tuple({**defaults, **row}[name] for name in schemas.KAFKA.names))
    return spark.createDataFrame(made, schemas.KAFKA)


def _line(row: Row) -> str:
    # Spark gives binary as bytearray.
    plain = {name: bytes(value) if isinstance(value, bytearray) else value for name, value in row.items()}
    return ", ".join(f"{name}={value!r}" for name, value in plain.items())
