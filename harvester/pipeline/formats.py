"""The table formats: Delta, the default, and Iceberg."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any
from zlib import crc32

from py4j.protocol import Py4JJavaError
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for it

from harvester import failpoints
from harvester.pipeline import tables
from harvester.pipeline.errors import InputMissing, PipelineError, TableMismatch
from harvester.pipeline.schemas import Addition, Table, quote, text
from harvester.pipeline.session import DELTA, FORMAT, ICEBERG
from harvester.pipeline.store import CATALOG, END_JOBS, ErasedTable, TableStore
from harvester.pipeline.tables import java_class


def open_store(spark: SparkSession, root: str) -> TableStore:
    """Opens the tables at `root`: a directory, a URL, or CATALOG.SCHEMA. Spark's setting FORMAT selects their format.

    Raises InputMissing for a schema that does not exist, TableMismatch if `root` does not support the format.
    """
    known: dict[str | None, type[TableStore]] = {DELTA: DeltaStore, ICEBERG: IcebergStore}
    if (kind := spark.conf.get(FORMAT, DELTA)) not in known:
        raise TableMismatch(f"unknown table format {kind}", hint=f"{FORMAT} must be {' or '.join(map(str, known))}")
    store = known[kind](spark, root)
    if store.is_catalog and not spark.catalog.databaseExists(store.schema):
        raise InputMissing(f"there is no schema {root}", hint="create it with CREATE SCHEMA")
    return store


_DELTA = "org.apache.spark.sql.delta"
_BOUNDED = "delta.dataSkippingStatsColumns"
_WIDENING = "delta.enableTypeWidening"
_LOCAL_TIMES = "delta.feature.timestampNtz"
_HIDDEN = "*********(redacted)"
_VACUUM = {
    # Unreferenced files may be brand-new.
    "spark.databricks.delta.retentionDurationCheck.enabled": "false",
    "spark.databricks.delta.vacuum.logging.enabled": "true",
}


class DeltaStore(TableStore):
    """Delta skips an append whose transaction name and number the table already has."""

    format, _other = "delta", "iceberg"
    _log = "_delta_log"

    def _in_directory(self, name: str) -> str:
        return f"delta.{quote(tables.path_of(self.root, name))}"

    def _is_there(self, name: str) -> bool:
        if self.is_catalog:
            return super()._is_there(name)
        # A log without an entry is a table whose creation was interrupted: it is created again.
        log = tables.listing(self.spark, tables.path_of(self.root, f"{name}/{self._log}"))
        return any(one[:20].isdigit() for one in log)

    def _settings(self, table: Table, of_lake: bool) -> Mapping[str, str]:
        own = {"delta.autoOptimize.optimizeWrite": "true"}
        if of_lake:
            # With Delta's default every tenth batch would wait for a checkpoint of the log.
            own = {"delta.enableDeletionVectors": "true", "delta.checkpointInterval": "100"}
        return own | ({_BOUNDED: ",".join(table.bounded)} if table.bounded else {})

    def properties(self, name: str) -> dict[str, str]:
        found = {row["key"]: row["value"] for row in self.spark.sql(f"SHOW TBLPROPERTIES {self.at(name)}").collect()}
        if _HIDDEN in found.values():
            # Spark hides values that look like secrets, such as the name of a header that contains "token". DESCRIBE
            # DETAIL shows them, but runs two jobs to count the table's files.
            detail = self.spark.sql(f"DESCRIBE DETAIL {self.at(name)}").select("properties").first()
            assert detail is not None
            found |= detail["properties"]
        return found

    def grow(self, name: str, added: Sequence[Addition], widened: Sequence[Addition]) -> None:
        # Not before they are needed: not every reader of Delta's tables knows of them.
        needed = {_WIDENING: "true"} if widened else {}
        if any("timestamp_ntz" in one.kind.simpleString() for one in added):
            needed[_LOCAL_TIMES] = "supported"
        for feature, value in needed.items():
            self.set_property(name, feature, value)
        super().grow(name, added, widened)

    def append(self, rows: DataFrame, name: str, transaction: tuple[str, int] | None = None) -> None:
        options = {}
        if transaction is not None:
            # Delta skips a transaction if its application has already committed this version or a later one.
            owner, number = transaction
            options = {"txnAppId": f"{owner}-{name}", "txnVersion": str(number)}
        if self.is_catalog:
            rows.writeTo(self.at(name)).options(**options).append()
        else:
            rows.write.format("delta").mode("append").options(**options).save(tables.path_of(self.root, name))

    def _last_written(self, name: str, owner: str) -> int | None:
        _, snapshot = self._logged(name)
        none = java_class(self.spark, "scala.Option").empty()
        # The checksum is a file next to the last commit. If it is missing, Delta runs two jobs to read the whole log.
        checksum = snapshot.checksumOpt()
        known = checksum.get().setTransactions() if checksum.isDefined() else none
        transactions = (known.get() if known.isDefined() else snapshot.setTransactions()).iterator()
        found: int | None = None
        while transactions.hasNext():
            one = transactions.next()
            if one.appId() == f"{owner}-{name}":
                found = int(one.version())
        return found

    def compact(self, name: str, before: date | None = None) -> None:
        self.spark.sql(f"OPTIMIZE {self.at(name)}" + ("" if before is None else f" WHERE day < DATE'{before}'"))

    def version(self, name: str) -> int:
        return int(self._logged(name)[1].version())

    def erase(self, name: str, where: str, statement: str) -> ErasedTable:
        # VACUUM splits its list of directories into this many parts: by default 10,000, for a few directories.
        tasks = str(self.spark.sparkContext.defaultParallelism)
        for setting, value in {**_VACUUM, "spark.sql.sources.parallelPartitionDiscovery.parallelism": tasks}.items():
            self.spark.conf.set(setting, value)
        at = self.at(name)
        rows = self.spark.sql(statement).collect()[0][0]
        self.spark.sql(f"REORG TABLE {at} APPLY (PURGE)")
        self.spark.sql(f"VACUUM {at} RETAIN 0 HOURS")
        last = self._latest(name)
        log, _ = self._logged(name)
        log.checkpoint()
        # Entries before this version are not needed to read it. They contain predicates and bounds of columns.
        where_it_is = f"{self._directory(name)}/{self._log}"
        there = {one: int(one[:20]) for one in tables.listing(self.spark, where_it_is) if one[:20].isdigit()}
        if not any(number == last["version"] and ".checkpoint" in one for one, number in there.items()):
            raise PipelineError(f"{self.named(name)} was written to in the meantime", hint=END_JOBS)
        old = {one: number for one, number in there.items() if number < last["version"]}
        tables.remove(self.spark, [f"{where_it_is}/{one}" for one in old])
        versions = (min(old.values()), max(old.values())) if old else None
        return ErasedTable(int(rows), int(last["operationMetrics"].get("numDeletedFiles", 0)), versions)

    def _latest(self, name: str) -> Any:
        last = self.spark.sql(f"DESCRIBE HISTORY {self.at(name)} LIMIT 1").select("version", "operationMetrics").first()
        assert last is not None
        return last

    def _logged(self, name: str) -> tuple[Any, Any]:
        """Delta's objects for the log of a table and for its latest version."""
        delta, none = java_class(self.spark, f"{_DELTA}.DeltaLog"), java_class(self.spark, "scala.Option").empty()
        log = delta.forTable(self.spark._jsparkSession, self._directory(name))
        return log, log.update(False, none, none)

    def _directory(self, name: str) -> str:
        return self._details(name)["Location"] if self.is_catalog else tables.path_of(self.root, name)


_STAGED = "spark.wap.id"
_KEPT = 100
_COMPACTED = {"min-input-files": "2", "min-file-size-bytes": str(64 * 2**20)}
_BOUNDS = "write.metadata.metrics.default"
"""Of columns that no job looks for there are none: they would hold keys and values, and stay after an erasure."""
_NEW_TABLE = {
    "format-version": "2",
    "write.wap.enabled": "true",
    # Each task writes the files of a few days side by side, so that records need not be shuffled by day.
    "write.distribution-mode": "none",
    "write.spark.fanout.enabled": "true",
    "write.target-file-size-bytes": str(256 * 2**20),
    # Each commit writes a metadata file that lists all snapshots.
    "write.metadata.delete-after-commit.enabled": "true",
    # The last snapshots tell which batches were written, so the user's expiry must keep them.
    "history.expire.min-snapshots-to-keep": str(_KEPT),
}


class IcebergStore(TableStore):
    """Stages each append under the name of its batch, then publishes it, which Iceberg does once per name.

    A directory becomes a catalog of its own, because SQL can change Iceberg's tables only through a catalog.
    """

    format, _other = "iceberg", "delta"
    _log = "metadata"
    _lacked = "[:<,](tinyint|smallint)(?=[,>])"

    def __init__(self, spark: SparkSession, root: str) -> None:
        super().__init__(spark, root)
        name = root.partition(".")[0] if self.is_catalog else f"harvester_{crc32(self.root.encode()):08x}"
        self._catalog, self._hit, conf = quote(name), failpoints.load().hit, spark.conf
        if not self.is_catalog:
            if tables.is_object_store(spark, self.root):
                raise TableMismatch(
                    f"{self.root} is on an object store, where Iceberg cannot commit without a catalog",
                    hint="use a schema of a catalog instead: CATALOG.SCHEMA",
                )
            for key, value in self.settings().items():
                conf.set(key, value)
        # With a cache, a session would see its own commits, but not those of other sessions.
        key = f"{CATALOG}{name}.cache-enabled"
        if conf.get(key, "false") != "false":
            raise TableMismatch(f"the catalog {name} caches its tables", hint=f"remove the setting {key}")
        conf.set(key, "false")

    def settings(self) -> dict[str, str]:
        catalog = CATALOG + self._catalog.strip("`")
        return {} if self.is_catalog else {
            catalog: "org.apache.iceberg.spark.SparkCatalog", f"{catalog}.type": "hadoop",
            f"{catalog}.warehouse": self.root.rstrip("/"),
        }  # fmt: skip

    def _in_directory(self, name: str) -> str:
        return ".".join([self._catalog, *map(quote, name.split("/"))])

    def _settings(self, table: Table, of_lake: bool) -> Mapping[str, str]:
        metrics = {f"write.metadata.metrics.column.{name}": "full" for name in table.bounded}
        return {**_NEW_TABLE, _BOUNDS: "none", **metrics}

    def properties(self, name: str) -> dict[str, str]:
        return dict(self._java(name).properties())

    def append(self, rows: DataFrame, name: str, transaction: tuple[str, int] | None = None) -> None:
        writer, conf = self._whole(rows, name).writeTo(self.at(name)), rows.sparkSession.conf
        if transaction is None:
            conf.unset(_STAGED)
            writer.append()
            return
        # All tables of a batch use the same name; they are written concurrently.
        staged = _staged(*transaction)
        conf.set(_STAGED, staged)
        writer.append()
        self._hit("lake.publish")
        try:
            self._call("publish_changes", name, wap_id=text(staged))
        except Py4JJavaError as error:
            # The second one is raised if two drivers publish the same snapshot.
            if not re.search("DuplicateWAPCommitException|CherrypickAncestorCommitException", str(error)):
                raise

    def replace(self, rows: DataFrame, name: str, where: Column | None = None) -> None:
        rows.sparkSession.conf.unset(_STAGED)
        super().replace(self._whole(rows, name), name, where)

    def _whole(self, rows: DataFrame, name: str) -> DataFrame:
        """Adds the columns that the user added to the table, as NULL; Delta does so by itself."""
        own = [one for one in self.table(name).schema if one.name not in rows.columns]
        return rows.select("*", *(F.lit(None).cast(one.dataType).alias(one.name) for one in own))

    def change(self, statement: str) -> None:
        self.spark.conf.unset(_STAGED)
        super().change(statement)

    def _last_written(self, name: str, owner: str) -> int | None:
        noted = self.properties(name).get(tables.WRITTEN, "")
        prefix = text(_staged(owner, 0)[:-1])
        told = self.spark.table(f"{self.at(name)}.snapshots").select(
            F.expr("coalesce(summary['wap.id'], summary['published-wap-id']) AS batch")
        )
        told = told.unionByName(self.spark.range(1).select(F.lit(noted).alias("batch")))
        number = F.expr(f"CAST(substr(batch, length({prefix}) + 1) AS BIGINT)")
        found = told.where(f"startswith(batch, {prefix})").agg(F.max(number)).first()
        return None if found is None else found[0]

    def compact(self, name: str, before: date | None = None) -> None:
        where = {} if before is None else {"where": text(f"day < DATE'{before}'")}
        self._call("rewrite_data_files", name, options=_map(_COMPACTED), **where)

    def version(self, name: str) -> int:
        snapshot = self._java(name).currentSnapshot()
        return 0 if snapshot is None else int(snapshot.snapshotId())

    def as_of(self, name: str, version: int) -> str:
        return super().as_of(name, version) if version else f"(SELECT * FROM {self.at(name)} LIMIT 0)"

    def refs(self, name: str) -> list[str]:
        return sorted(set(self._java(name).refs()) - {"main"})

    def erase(self, name: str, where: str, statement: str) -> ErasedTable:
        rows = self.table(name).where(where).count()
        if rows:
            self.change(statement)
        at = self.at(name)
        has_bounds = self.properties(name).get(_BOUNDS) != "none"
        if has_bounds:  # of an earlier version: its manifests keep the beginnings of texts, also of removed files
            self.set_property(name, _BOUNDS, "none")
        if has_bounds or not self.spark.table(f"{at}.delete_files").isEmpty():
            options = {"rewrite-all": "true", "remove-dangling-deletes": "true"}
            self._call("rewrite_data_files", name, options=_map(options))
            self.append(self.table(name).limit(0), name)  # a new snapshot, also of a table that is empty now
        owner = self.properties(name).get(tables.OWNER)
        if owner is not None and (number := self._last_written(name, owner)) is not None:
            self.set_property(name, tables.WRITTEN, _staged(owner, number))
        table = self._java(name)
        before = [one.sequenceNumber() for one in table.snapshots()]
        now = int(time.time() * 1000)
        gone = self._call("expire_snapshots", name, older_than=f"timestamp_millis({now + 1}L)", retain_last="1")[0]
        table.refresh()
        if len(left := [one.sequenceNumber() for one in table.snapshots()]) > 1:
            self.require_erasable([name])
            raise PipelineError(f"{self.named(name)} was written to in the meantime", hint=END_JOBS)
        # Interrupted writes may have left files to which no snapshot refers.
        actions = java_class(self.spark, "org.apache.iceberg.spark.actions.SparkActions")
        action = actions.get(self.spark._jsparkSession).deleteOrphanFiles(table)
        strays = len(list(action.olderThan(now).execute().orphanFileLocations()))
        removed = sorted(set(before) - set(left))
        versions = (removed[0], removed[-1]) if removed else None
        return ErasedTable(rows, gone["deleted_data_files_count"] + strays, versions)

    def _call(self, procedure: str, name: str, **arguments: str) -> list[Any]:
        given = ", ".join(f"{key} => {value}" for key, value in {"table": text(self.at(name)), **arguments}.items())
        return self.spark.sql(f"CALL {self._catalog}.system.{procedure}({given})").collect()

    def _java(self, name: str) -> Any:
        """Iceberg's object for a table, taken from a plan: its lookup by name would use the thread's session."""
        return self.table(name)._jdf.queryExecution().analyzed().collectLeaves().head().table().table()


def _staged(owner: str, number: int) -> str:
    return f"{owner}-{number}"


def _map(options: Mapping[str, str]) -> str:
    return f"map({', '.join(text(part) for pair in options.items() for part in pair)})"
