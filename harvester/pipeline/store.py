"""The tables of a job: the few operations that jobs need, independent of table format and location. ADR 29.

Tables are named after their directories: `silver`, `json/orders`. In a schema of a catalog the latter is `json_orders`.
`formats` implements what differs between formats.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import ClassVar, Self

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for it

from harvester.pipeline import schemas, tables
from harvester.pipeline.errors import CheckpointMismatch, InputMissing, TableMismatch
from harvester.pipeline.schemas import Addition, Table, quote, text

CATALOG = "spark.sql.catalog."
_PARTITIONS = "# Partition Information"
_VALUES = "json/"
END_JOBS = "stop the jobs that write there, then repeat this"


@dataclass(frozen=True, slots=True)
class ErasedTable:
    """The result of an erasure. `versions`: the first and the last version that can no longer be read."""

    rows: int
    files_removed: int
    versions: tuple[int, int] | None


class TableStore(ABC):
    """The tables at `root`, as the session `spark` sees them. `is_catalog`: in a schema rather than in a directory."""

    format: ClassVar[str]
    _other: ClassVar[str]
    _log: ClassVar[str]
    """A directory that every table has, even if its creation was interrupted."""
    _lacked: ClassVar[str] = ""

    def __init__(self, spark: SparkSession, root: str) -> None:
        first, dot, _ = root.partition(".")
        kind = spark.conf.get(CATALOG + first, "" if first == "spark_catalog" else None)
        self.spark, self.is_catalog = spark, bool(dot) and "/" not in root and kind is not None
        self.root = root if self.is_catalog or "/" in root else str(Path(root).absolute())
        self.schema = ".".join(map(quote, root.split(".")))
        if self.is_catalog and self._other in (kind or "").lower():
            hint = f"use --format {self._other}, or another catalog"
            raise TableMismatch(f"the catalog {first} is for tables of {self._other.title()}", hint=hint)

    def settings(self) -> dict[str, str]:
        """The Spark settings with which other sessions find the tables."""
        return {}

    def in_new_session(self) -> Self:
        """The same tables in a new session, which has its own settings."""
        return type(self)(self.spark.newSession(), self.root)

    def at(self, name: str) -> str:
        """The name of a table in Spark SQL."""
        return f"{self.schema}.{quote(_flat(name))}" if self.is_catalog else self._in_directory(name)

    def beside(self, name: str) -> str:
        """The path of a file or directory next to the tables; for a schema, next to the checkpoint that silver names.

        Raises CheckpointMismatch if no checkpoint is named.
        """
        if not self.is_catalog:
            return tables.path_of(self.root, name)
        noted = self.properties("silver").get(tables.CHECKPOINT) if self.exists("silver") else None
        if noted is None:
            raise CheckpointMismatch(
                f"the location of the files that belong to the tables in {self.root} is unknown",
                hint="specify a directory for the checkpoint with --checkpoint",
            )
        return noted if name == "checkpoint" else f"{noted}-{name}"

    def table(self, name: str) -> DataFrame:
        """The rows as stored."""
        return self.spark.table(self.at(name))

    def exists(self, name: str) -> bool:
        """Whether the table exists. Raises TableMismatch for a directory that contains anything else."""
        if self._is_there(name):
            return True
        path = tables.path_of(self.root, name)
        if not self.is_catalog and set(tables.listing(self.spark, path)) - {self._log}:
            raise TableMismatch(
                f"{path} is neither empty nor a table of {self.format.title()}",
                hint="use an empty directory, or the --format of its tables",
            )
        return False

    def values(self) -> list[str]:
        """The existing tables of topics' values."""
        if not self.is_catalog:
            return [f"{_VALUES}{name}" for name in tables.listing(self.spark, tables.path_of(self.root, "json"))]
        rows = self.spark.sql(f"SHOW TABLES IN {self.schema} LIKE 'json_*'").where("NOT isTemporary").collect()
        names = {row["tableName"]: _deep(row["tableName"]) for row in rows}
        ours = [name for table, name in names.items() if _flat(name) == table]
        return [name for name in ours if tables.OWNER in self.properties(name)]

    def require_types(self, wanted: Iterable[Table]) -> None:
        """Raises TableMismatch for columns of types that the format does not support."""
        for table in wanted:
            if self._lacked and (found := re.search(self._lacked, table.schema.simpleString())):
                said = f"{self.format.title()} has no type {found[1]}, which {table.name} requires"
                raise TableMismatch(said, hint="use INT")

    def prepare(self, wanted: Iterable[Table], owner: str | None = None, header: str | None = None) -> None:
        """Creates missing tables and adds missing columns.

        Raises TableMismatch for any other difference, before it changes anything. Without an `owner`, any job may
        append to the tables. `header`: the name of the harvester's header, for a lake.
        """
        listed = list(wanted)
        additions = [self._check(table, owner) for table in listed]
        for table, missing in zip(listed, additions, strict=True):
            at = self.at(table.name)
            if missing is None:
                own = {tables.OWNER: owner, tables.HEADER: header}
                noted = {name: value for name, value in own.items() if value is not None}
                made = schemas.create(at, self.format, table, {**self._settings(table, owner is not None), **noted})
                self.spark.sql(made)
            elif missing:
                self.spark.sql(schemas.add_columns(at, missing))

    def _check(self, table: Table, owner: str | None) -> list[schemas.Addition] | None:
        """The columns to add; None if the table does not exist yet."""
        if not self.exists(table.name):
            return None
        at = self.at(table.name)
        if self.is_catalog and (found := self._details(table.name)["Provider"].lower()) != self.format:
            hint = f"use --format {found}, or another schema"
            raise TableMismatch(f"{at} is a table of the format {found}", hint=hint)
        missing, problems = schemas.differences(self.table(table.name).schema, table.schema)
        if (by := self._partitioning(table.name)) != table.partitioned_by:
            wanted = ", ".join(table.partitioned_by) or "nothing"
            problems.append(f"it is partitioned by {', '.join(by) or 'nothing'}, not by {wanted}")
        if problems:
            raise TableMismatch(
                f"the table {self.named(table.name)} has a different schema: {'; '.join(problems)}",
                hint="write to another directory, or repair the table",
            )
        if owner is not None and self.properties(table.name).get(tables.OWNER) != owner:
            raise self.filled_by_another(table.name)
        return missing

    def filled_by_another(self, name: str) -> TableMismatch:
        """The error for a table that belongs to another checkpoint."""
        said = f"the table {self.named(name)} belongs to another checkpoint"
        return TableMismatch(said, hint=tables.FOREIGN)

    def named(self, name: str) -> str:
        """The name of a table in messages."""
        return f"{self.root}.{_flat(name)}" if self.is_catalog else tables.path_of(self.root, name)

    def grow(self, name: str, added: Sequence[Addition], widened: Sequence[Addition]) -> None:
        """Adds columns to a table, and widens the types of others."""
        at = self.at(name)
        if added:
            self.spark.sql(schemas.add_columns(at, added))
        for one in widened:
            self.spark.sql(schemas.widen(at, one))

    def load(self, table: Table) -> DataFrame:
        """A table that `pipeline lake` created. Raises InputMissing, or TableMismatch if columns are missing."""
        if not self.exists(table.name):
            raise InputMissing(f"no table {table.name} in {self.root}", hint="`harvester pipeline lake` creates it")
        rows = self.table(table.name)
        missing, problems = schemas.differences(rows.schema, table.schema)
        if missing or problems:
            said = "; ".join([*(f"column {'.'.join(one.path)} is missing" for one in missing), *problems])
            raise TableMismatch(
                f"the table {self.named(table.name)} has a different schema: {said}",
                hint="run `harvester pipeline lake` first",
            )
        return rows

    def header(self) -> str:
        """The name of the harvester's header in a lake. Raises as `load` does, and TableMismatch for an old lake."""
        if not self.is_catalog and self.exists("bronze"):
            raise TableMismatch(f"{self.root} is a lake of an earlier version", hint=tables.REBUILD)
        self.load(schemas.SILVER_TABLE)
        return self.properties("silver").get(tables.HEADER, "harvester")

    def set_property(self, name: str, key: str, value: str) -> None:
        self.spark.sql(f"ALTER TABLE {self.at(name)} SET TBLPROPERTIES ({text(key)} = {text(value)})")

    def replace(self, rows: DataFrame, name: str, where: Column | None = None) -> None:
        """Replaces the rows of a table in one commit: all, or those of the partitions that `where` selects."""
        rows.writeTo(self.at(name)).overwrite(F.lit(True) if where is None else where)

    def change(self, statement: str) -> None:
        """Runs a MERGE, UPDATE or DELETE."""
        self.spark.sql(statement)

    def last_written(self, names: Iterable[str], owner: str) -> int | None:
        """The highest number of the owner's batches in these tables; None if they have none."""
        found = [self._last_written(name, owner) for name in names if self.exists(name)]
        return max((number for number in found if number is not None), default=None)

    def _is_there(self, name: str) -> bool:
        return bool(self.spark.catalog.tableExists(self.at(name)))

    def _details(self, name: str) -> dict[str, str]:
        rows = self.spark.sql(f"DESCRIBE TABLE EXTENDED {self.at(name)}").collect()
        return {row["col_name"]: row["data_type"] for row in rows}

    def _partitioning(self, name: str) -> tuple[str, ...]:
        names = [row["col_name"] for row in self.spark.sql(f"DESCRIBE TABLE {self.at(name)}").collect()]
        # A heading, the headings of its columns, then the names.
        return tuple(names[names.index(_PARTITIONS) + 2 :]) if _PARTITIONS in names else ()

    @abstractmethod
    def _in_directory(self, name: str) -> str: ...

    @abstractmethod
    def _settings(self, table: Table, of_lake: bool) -> Mapping[str, str]: ...

    @abstractmethod
    def _last_written(self, name: str, owner: str) -> int | None: ...

    @abstractmethod
    def properties(self, name: str) -> dict[str, str]:
        """The properties of a table, including those that the format adds."""

    @abstractmethod
    def append(self, rows: DataFrame, name: str, transaction: tuple[str, int] | None = None) -> None:
        """Appends rows. `transaction`: the owner and the batch number; appending a batch again has no effect."""

    @abstractmethod
    def compact(self, name: str, before: date | None = None) -> None:
        """Compacts small files, of days before `before` if given. Replaced files stay until the user removes them."""

    @abstractmethod
    def version(self, name: str) -> int:
        """The latest version of a table, to pass to `as_of`."""

    def as_of(self, name: str, version: int) -> str:
        """A version of a table in Spark SQL."""
        return f"{self.at(name)} VERSION AS OF {version}"

    def refs(self, name: str) -> list[str]:
        """The tags and branches of a table, which keep the versions that they name."""
        return []

    def require_erasable(self, names: Iterable[str]) -> None:
        """Raises TableMismatch if these tables have versions that `erase` cannot end."""
        kept = ((self.named(name), self.refs(name)) for name in names)
        if told := "; ".join(f"{name}: {', '.join(refs)}" for name, refs in kept if refs):
            raise TableMismatch(
                f"tables have tags or branches, in which an erased key could still be read ({told})",
                hint="drop them with ALTER TABLE … DROP TAG or DROP BRANCH in a session with Iceberg's SQL extensions",
            )

    @abstractmethod
    def erase(self, name: str, where: str, statement: str) -> ErasedTable:
        """Runs `statement`, which leaves no row that matches `where`, then removes all traces of such rows from files.

        Repeatable after an interruption: rows may already be deleted while their files still exist.
        """


def _flat(name: str) -> str:
    """The name in a schema, where only lower-case letters, digits and underscores are safe."""
    topic = name.removeprefix(_VALUES)
    if topic == name:
        return name
    return "json_" + re.sub("[^a-z0-9]", lambda found: "__" if found[0] == "_" else f"_{ord(found[0]):02x}", topic)


def _deep(name: str) -> str:
    """The inverse of `_flat`."""
    topic = name.removeprefix("json_")
    return _VALUES + re.sub("_(_|[0-9a-f]{2})", lambda found: "_" if found[1] == "_" else chr(int(found[1], 16)), topic)
