"""What a lake has to hold, said once more in plain Python, and a lake's tables to compare it with."""

from __future__ import annotations

import atexit
import math
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

from harvester.origin import HEADER
from harvester.pipeline import schemas, streaming, tables
from harvester.pipeline.formats import open_store
from harvester.pipeline.lake import silver
from harvester.pipeline.lake.batch import LakeBatch
from harvester.pipeline.lake.ids import StoredIds
from harvester.pipeline.lake.job import LakeSettings, run
from harvester.pipeline.origin_columns import bronze_columns
from harvester.pipeline.session import DELTA
from harvester.pipeline.store import TableStore

from .harvested import Delivered, first_ones
from .servers import in_memory
from .sparks import kafka_rows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Name = tuple[UUID, int]


class Oracle:
    """Is told what each batch has; knows what the tables have to hold after it."""

    def __init__(self) -> None:
        self.bronze: list[Delivered] = []
        self.silver: dict[Name, Delivered] = {}
        self._since: dict[UUID, int] = {}

    def take(self, batch: Iterable[Delivered]) -> None:
        """One batch; batches come in the order in which they are read."""
        records = list(batch)
        self.bronze += records
        for name, one in first_ones(records).items():
            self.silver.setdefault(name, one)
        for one in sorted(records, key=lambda one: one.sent.at_ms):
            if one.sent.named:
                self._since.setdefault(one.sent.incarnation, one.sent.at_ms)

    def current(self) -> dict[tuple[str, bytes], tuple[Name, bytes | None]]:
        """Of each topic and key the name of the last record, and its value; None: deleted."""
        named = sorted(self.silver.items(), key=lambda one: self._age(one[0]))
        # Of a key the last one stays.
        return {(one.topic, one.sent.key): (name, one.sent.value) for name, one in named if one.sent.key is not None}

    def _age(self, name: Name) -> tuple[int, str, int]:
        incarnation, number = name
        return self._since[incarnation], str(incarnation), number


_OWNER = "test"


@cache
def _empty(spark: SparkSession) -> Path:
    """Delta's tables of a lake that has read nothing. To make them takes longer than to write a batch."""
    root = Path(tempfile.mkdtemp(prefix="harvester-lake-", dir=in_memory()))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    open_store(spark, str(root)).prepare(schemas.TABLES, _OWNER, HEADER)
    return root


def make_lake(spark: SparkSession, root: Path, *batches: Iterable[Mapping[str, Any]]) -> str:
    """A lake of these rows of Kafka (`kafka_rows`), without Kafka; returns its directory."""
    store = open_store(spark, str(root))
    if store.format == DELTA:
        shutil.copytree(_empty(spark), root, dirs_exist_ok=True)
    else:  # Iceberg's tables name the directory that they are in
        store.prepare(schemas.TABLES, _OWNER, HEADER)
    batch = LakeBatch(store, f"{root}/checkpoint", _OWNER, HEADER, {})
    for number, rows in enumerate(batches):
        batch.write(bronze_columns(kafka_rows(spark, rows)), number)
    return str(root)


def first_deliveries(bronze: DataFrame, stored: StoredIds | None = None, table: DataFrame | None = None) -> DataFrame:
    """schemas.BRONZE → the same: what a batch finds new, given the ids that are stored and the table that has them."""
    found = silver.summed_up(silver.overview(bronze).collect())
    suspects = found.ids.suspects(stored or StoredIds())
    empty = silver.deliveries(bronze, HEADER).limit(0)
    places = silver.repeats(bronze, suspects, empty if table is None else table) if suspects else None
    return silver.without(bronze, places).where("problem IS NULL")


class Lake:
    """The tables in a directory, or at a URL, and the job that writes them, in this process."""

    def __init__(self, spark: SparkSession, root: Path, bootstrap: str, url: str | None = None) -> None:
        self.spark, self.root, self.bootstrap = spark, root, bootstrap
        self.address = url or str(root)
        self.folds = True
        """False leaves out the fold at the end of `once`, which takes nearly as long as all else together."""
        self.is_prepared = url is None
        """The first `once` finds tables, as after a start that was cut off once it had made them; False: it makes them.

        Unless there is something in the directory, or the checkpoint is elsewhere.
        """

    def once(self, *topics: str, say: Callable[[str], None] = lambda _: None, **settings: Any) -> int:
        """`lake --once`; how many records it read."""
        kafka = {"bootstrap.servers": self.bootstrap}
        given: dict[str, Any] = {"compact_every": 0, "fold_s": 600.0 if self.folds else math.inf, **settings}
        if self.is_prepared and "checkpoint" not in given and not self.root.exists():
            shutil.copytree(_empty(self.spark), self.root)
            streaming.store(self.spark, f"{self.root}/checkpoint", streaming.Manifest(_OWNER, "lake", topics, HEADER))
        return run(self.spark, LakeSettings(topics, self.address, kafka, once=True, **given), say=say)

    def rows(self, table: str, *columns: str) -> list[Any]:
        """Of a table or a view, these columns or all. `current` is the view."""
        at = self.store.at
        if table == "bronze":
            frame = self.spark.sql(schemas.bronze(at, HEADER))
        elif table == "silver":
            frame = self.spark.sql(schemas.deliveries(at("silver"), HEADER))
        elif table == "current":
            frame = self.spark.sql(schemas.current(at, HEADER, self.folded))
        else:
            frame = self.table(table)
        return frame.select(*columns or ["*"]).collect()

    @property
    def store(self) -> TableStore:
        """Its tables."""
        return open_store(self.spark, self.address)

    def table(self, name: str) -> DataFrame:
        """As it is stored."""
        return self.store.table(name)

    @property
    def folded(self) -> str | None:
        """The batch up to which the table `current` has the states."""
        return self.store.properties("current").get(tables.FOLDED)

    def files(self, table: str) -> int:
        """How many files the table now consists of."""
        return len(self.table(table).inputFiles())

    def versions(self) -> dict[str, int]:
        """How often each table was written to."""
        logs = self.root.glob("**/_delta_log")
        return {str(log.parent.relative_to(self.root)): len(list(log.glob("0*[0-9].json"))) for log in logs}

    def assert_holds(self, oracle: Oracle) -> None:
        """Bronze, silver and current are what they have to be, each row once, and headers as they were sent."""
        got = self.rows("bronze", "topic", "partition", "offset", "headers")
        places = [(one.topic, one.partition, one.offset) for one in oracle.bronze]
        assert_same(places, [tuple(row[:3]) for row in got])
        sent = [(one.topic, one.partition, one.offset, tuple(one.sent.written())) for one in oracle.bronze]
        assert_same(sent, [(*row[:3], tuple((key, bytes(value)) for key, value in row[3] or ())) for row in got])
        expected = [
            (str(incarnation), number, one.topic, one.partition, one.offset, one.sent.value, one.sent.value is None)
            for (incarnation, number), one in oracle.silver.items()
        ]
        columns = ("incarnation", "id", "topic", "partition", "offset", "value", "tombstone")
        assert_same(expected, [_plain(row) for row in self.rows("silver", *columns)])
        states = [
            (topic, key, str(incarnation), number, value, value is None)
            for (topic, key), ((incarnation, number), value) in oracle.current().items()
        ]
        found = self.rows("current", "topic", "key", "incarnation", "id", "value", "deleted")
        assert_same(states, [_plain(row) for row in found])
        if self.folded is None:
            return
        # It does not matter how much of silver the table has.
        afresh = self.spark.sql(schemas.current(self.store.at, HEADER)).select(*found[0].__fields__ if found else "*")
        assert_same(states, [_plain(row) for row in afresh.collect()])


def assert_same(expected: Iterable[Any], found: Iterable[Any]) -> None:
    """The same rows, each as often; of what differs the first few are told."""
    wanted, there = Counter(expected), Counter(found)
    missing, more = wanted - there, there - wanted
    told = f"{missing.total()} missing: {list(missing)[:5]}; {more.total()} too many: {list(more)[:5]}"
    assert not missing, told
    assert not more, told


def moment_ms(at: datetime) -> int:
    """Of a timestamp as Spark gives it."""
    return round(at.timestamp() * 1000)


def _plain(row: Any) -> tuple[Any, ...]:
    return tuple(bytes(value) if isinstance(value, bytearray) else value for value in row)
