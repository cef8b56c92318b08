"""Places of tables: directories and schemas of real catalogs, in each format."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from psycopg.conninfo import conninfo_to_dict

from harvester.pipeline.session import DELTA, FORMAT, ICEBERG

from .lakes import Lake
from .longs import long
from .sparks import configure

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PLACES = ("delta schema", "iceberg directory", "iceberg schema")
"""Those that are not the usual one."""


def places(*usual: str) -> list[Any]:
    """PLACES as parameters of a test: these, and the others nightly."""
    return [pytest.param(one, marks=[] if one in usual else [long]) for one in PLACES]


@dataclass(frozen=True)
class Where:
    """A new place. `conf`: what Spark needs to know of it. `more`: settings of a lake's job there.

    `made`: the statement that makes its schema.
    """

    format: str
    address: str
    conf: Mapping[str, str]
    more: Mapping[str, str] = field(default_factory=dict)
    made: str | None = None


def iceberg_catalog(name: str, dsn: str, warehouse: Path) -> dict[str, str]:
    """A catalog of Iceberg's in a database of PostgreSQL."""
    parts = conninfo_to_dict(dsn)
    host, port, database = (str(parts.get(one, "")) for one in ("host", "port", "dbname"))
    catalog = f"spark.sql.catalog.{name}"
    conf = {
        catalog: "org.apache.iceberg.spark.SparkCatalog", f"{catalog}.type": "jdbc",
        f"{catalog}.uri": f"jdbc:postgresql://{host}:{port}/{database}", f"{catalog}.jdbc.user": str(parts["user"]),
        f"{catalog}.warehouse": str(warehouse), f"{catalog}.jdbc.schema-version": "V1",
    }  # fmt: skip
    return conf | ({f"{catalog}.jdbc.password": str(parts["password"])} if "password" in parts else {})


def where(place: str, root: Path, dsn: str) -> Where:
    """One of PLACES."""
    format_, _, kind = place.partition(" ")
    if kind == "directory":
        return Where(format_, str(root / "a lake: 50% é"), {})
    more = {"checkpoint": str(root / "checkpoint")}
    name = f"s{uuid.uuid4().hex[:8]}"
    if format_ == DELTA:
        made = f"CREATE SCHEMA spark_catalog.{name} LOCATION '{root}/warehouse'"
        return Where(format_, f"spark_catalog.{name}", {}, more, made)
    conf = iceberg_catalog(f"ours{name}", dsn, root / "warehouse")
    return Where(format_, f"ours{name}.sales", conf, more, f"CREATE SCHEMA ours{name}.sales")


@contextmanager
def known(spark: SparkSession, place: Where) -> Iterator[None]:
    """Spark knows the place, which has a schema then, and new tables have its format; for as long as this lasts."""
    configure(spark, {**place.conf, FORMAT: place.format})
    if place.made is not None:
        spark.newSession().sql(place.made)  # a job's session has not looked into the catalog yet
    try:
        yield
    finally:
        configure(spark, {FORMAT: DELTA})


class LakeAt(Lake):
    """A lake at such a place."""

    def __init__(self, spark: SparkSession, root: Path, bootstrap: str, place: Where) -> None:
        super().__init__(spark, root, bootstrap, place.address)
        self.place = place

    def once(self, *topics: str, say: Callable[[str], None] = lambda _: None, **settings: Any) -> int:
        """`lake --once`; how many records it read."""
        return super().once(*topics, say=say, **{**self.place.more, **settings})

    def files(self, table: str) -> int:
        """How many files the table now consists of."""
        if self.place.format == ICEBERG:
            return self.spark.table(f"{self.store.at(table)}.files").count()
        return super().files(table)

    def versions(self) -> dict[str, int]:
        """The latest version of each table."""
        names = ["silver", "repeats", "rejects", "current", "incarnations", "losses", "erasures", *self.store.values()]
        return {name: self.store.version(name) for name in names if self.store.exists(name)}
