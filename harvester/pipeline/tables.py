"""Makes, checks and appends to the Delta tables of a lake, and keeps small files beside them.

The files go through Hadoop's file systems: the same for a local disk, HDFS and object stores.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for it
from pyspark.sql.types import TimestampType

from harvester.pipeline import schemas
from harvester.pipeline.errors import InputMissing, TableMismatch
from harvester.pipeline.schemas import Table
from harvester.pipeline.session import java_class

_FILES = "org.apache.hadoop.fs"


def listing(spark: SparkSession, path: str) -> list[str]:
    """Names in a directory; [] where there is none."""
    place, system = _open(spark, path)
    if not system.exists(place):
        return []
    return [status.getPath().getName() for status in system.listStatus(place)]


def read_text(spark: SparkSession, path: str) -> str | None:
    """A file's text; None where there is none."""
    place, system = _open(spark, path)
    if not system.exists(place):
        return None
    stream = system.open(place)
    try:
        return str(java_class(spark, "org.apache.commons.io.IOUtils").toString(stream, "UTF-8"))
    finally:
        stream.close()


def write_text(spark: SparkSession, path: str, text: str) -> None:
    """Replace a file: on a local disk, HDFS and S3 all at once, so that a job that dies on the way leaves the old one.

    Elsewhere the connector may remove the old one before it renames.
    """
    content = bytearray(text.encode())
    place, system = _open(spark, path)
    if system.hasPathCapability(place, "fs.capability.outputstream.abortable"):
        # Such a store has what was written when the stream is closed, unless it is given up before.
        stream = system.create(place, True)
        try:
            stream.write(content)
        except BaseException:
            stream.abort()
            raise
        finally:
            stream.close()
        return
    aside = java_class(spark, f"{_FILES}.Path")(f"{path}.new")
    if system.getUri().getScheme() == "file":
        # Beside a local file Hadoop keeps another one with checksums, and would rename one after the other.
        local = java_class(spark, f"{_FILES}.FileSystem").getLocal(_configuration(spark))
        raw = local.getRawFileSystem()
        _fill(raw, aside, content)
        raw.delete(local.getChecksumFile(place), False)
        if not raw.rename(aside, place):
            raise OSError(f"{path}.new could not be renamed to {path}")
        return
    _fill(system, aside, content)
    rename = java_class(spark, f"{_FILES}.Options$Rename")
    overwrite = spark.sparkContext._gateway.new_array(rename, 1)  # type: ignore[union-attr]
    overwrite[0] = rename.OVERWRITE
    context = java_class(spark, f"{_FILES}.FileContext").getFileContext(system.getUri(), _configuration(spark))
    context.rename(context.makeQualified(aside), context.makeQualified(place), overwrite)


def _fill(system: Any, place: Any, content: bytearray) -> None:
    stream = system.create(place, True)
    try:
        stream.write(content)
    finally:
        stream.close()


def remove(spark: SparkSession, paths: Iterable[str]) -> None:
    """Removes files, if they are there."""
    for path in paths:
        place, system = _open(spark, path)
        system.delete(place, False)


def move(spark: SparkSession, source: str, target: str) -> None:
    """Gives a directory a name that nothing has."""
    (place, system), (to, _) = _open(spark, source), _open(spark, target)
    if not system.rename(place, to):
        raise OSError(f"{source} could not be renamed to {target}")


def copy(spark: SparkSession, source: str, target: str) -> None:
    """Copies a directory to a name that nothing has."""
    (place, system), (to, there) = _open(spark, source), _open(spark, target)
    java_class(spark, f"{_FILES}.FileUtil").copy(system, place, there, to, False, _configuration(spark))


def _open(spark: SparkSession, path: str) -> tuple[Any, Any]:
    place = java_class(spark, f"{_FILES}.Path")(path)
    return place, place.getFileSystem(_configuration(spark))


def _configuration(spark: SparkSession) -> Any:
    return spark.sparkContext._jsc.hadoopConfiguration()


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def instant(microseconds: int | None) -> datetime | None:
    """Microseconds since the epoch, UTC; the nearest that a datetime can hold."""
    if microseconds is None:
        return None
    try:
        return _EPOCH + timedelta(microseconds=microseconds)
    except OverflowError:
        return datetime(9999, 12, 31, tzinfo=UTC) if microseconds > 0 else datetime(1, 1, 1, tzinfo=UTC)


def collected(frame: DataFrame) -> list[dict[str, Any]]:
    """The rows, with timestamps in UTC; Spark's own would come back in the time zone of this machine."""
    times = [field.name for field in frame.schema if isinstance(field.dataType, TimestampType)]
    rows = frame.withColumns({name: F.unix_micros(name) for name in times}).collect()
    return [row.asDict() | {name: instant(row[name]) for name in times} for row in rows]


OWNER = "harvester.lake"
"""The table property that names the lake's checkpoint: what filled a table, alone may go on filling it."""
HEADER = "harvester.header"
"""Names the header that the table's columns were decoded from, without which no view can make it again."""
FOLDED = "harvester.folded"
"""Of `current`: the last batch of silver whose states it has."""
AGAIN = "harvester.again"
"""Of silver: the last batch that was given up half written, for its records to be read again."""
TOPICS = "harvester.topics"
"""Of silver: Kafka's ids of the topics that were read, and since which batch; for when the checkpoint is lost."""

REBUILD = "`harvester pipeline rebuild --from OLD --to NEW` makes a new one of it, once its job has ended"

FOREIGN = "go on with that checkpoint; if it is lost, `harvester pipeline lake --adopt` makes a new one from the tables"

_BOUNDED = "delta.dataSkippingStatsColumns"


def prepare(
    spark: SparkSession, root: str, tables: Iterable[Table], owner: str | None = None, header: str | None = None
) -> None:
    """Makes what is missing, adds columns that are new; TableMismatch for anything else, before anything is changed.

    Without an `owner`, anybody may add to the tables. `header`: of a lake.
    """
    wanted = list(tables)
    additions = {table.name: _check(spark, path_of(root, table.name), table, owner) for table in wanted}
    for table in wanted:
        path, missing = path_of(root, table.name), additions[table.name]
        if missing is None:
            bounded = {_BOUNDED: ",".join(table.bounded)} if table.bounded else {}
            own = {"delta.autoOptimize.optimizeWrite": "true"}
            if owner is not None:
                # Every tenth batch would wait for a checkpoint of the log, as Delta has it.
                own = {"delta.enableDeletionVectors": "true", "delta.checkpointInterval": "100", OWNER: owner}
            if header is not None:
                own[HEADER] = header
            spark.sql(schemas.create(path, table, {**own, **bounded}))
        elif missing:
            spark.sql(schemas.add_columns(path, missing))


_PARTITIONS = "# Partition Information"
_HIDDEN = "*********(redacted)"


def properties(spark: SparkSession, path: str) -> dict[str, str]:
    """The properties of the table in a directory, and what Delta adds to them."""
    rows = spark.sql(f"SHOW TBLPROPERTIES {schemas.at(path)}").collect()
    found = {row["key"]: row["value"] for row in rows}
    if _HIDDEN in found.values():
        # A value that looks like a secret, such as a header's name with "token" in it. DESCRIBE DETAIL shows it, and
        # counts the table's files for that, by two jobs.
        detail = spark.sql(f"DESCRIBE DETAIL {schemas.at(path)}").select("properties").first()
        assert detail is not None
        found |= detail["properties"]
    return found


def partitioning(spark: SparkSession, path: str) -> tuple[str, ...]:
    """The columns that the table in a directory is partitioned by."""
    names = [row["col_name"] for row in spark.sql(f"DESCRIBE TABLE {schemas.at(path)}").collect()]
    # A heading and another one for its columns, then these.
    return tuple(names[names.index(_PARTITIONS) + 2 :]) if _PARTITIONS in names else ()


def set_property(spark: SparkSession, path: str, name: str, value: str) -> None:
    pair = f"{schemas.text(name)} = {schemas.text(value)}"
    spark.sql(f"ALTER TABLE {schemas.at(path)} SET TBLPROPERTIES ({pair})")


def append(rows: DataFrame, root: str, name: str, transaction: tuple[str, int] | None = None) -> None:
    """Adds rows to a table. `transaction`: the owner and a batch's number; repeated, the batch has no effect."""
    writer = rows.write.format("delta").mode("append")
    if transaction is not None:
        # Delta leaves out a transaction whose application has committed this version, or a later one, before.
        owner, number = transaction
        writer = writer.options(txnAppId=f"{owner}-{name}", txnVersion=str(number))
    writer.save(path_of(root, name))


def last_written(spark: SparkSession, root: str, names: Iterable[str], owner: str) -> int | None:
    """The highest number of a transaction of the owner that one of these tables has, as `append` names them."""
    found, none = list[int](), java_class(spark, "scala.Option").empty()
    for name in names:
        if not exists(spark, path := path_of(root, name)):
            continue
        log = java_class(spark, "org.apache.spark.sql.delta.DeltaLog").forTable(spark._jsparkSession, path)
        snapshot = log.update(False, none, none)
        # In a file beside the last commit. If that is missing, Delta reads all of the log, by two jobs.
        checksum = snapshot.checksumOpt()
        known = checksum.get().setTransactions() if checksum.isDefined() else none
        transactions = (known.get() if known.isDefined() else snapshot.setTransactions()).iterator()
        while transactions.hasNext():
            one = transactions.next()
            if one.appId() == f"{owner}-{name}":
                found.append(int(one.version()))
    return max(found, default=None)


def path_of(root: str, name: str) -> str:
    """The directory of a table."""
    return f"{root.rstrip('/')}/{name}"


def exists(spark: SparkSession, path: str) -> bool:
    """Whether there is a Delta table; TableMismatch for a directory with anything else in it."""
    # Killed while it was made, a table is a log without an entry: it is made again.
    if any(name[:20].isdigit() for name in listing(spark, f"{path}/_delta_log")):
        return True
    if set(listing(spark, path)) - {"_delta_log"}:
        raise TableMismatch(f"{path} holds something that is no Delta table", hint="name an empty directory")
    return False


def load(spark: SparkSession, root: str, table: Table) -> DataFrame:
    """A table that `pipeline lake` has made; raises InputMissing, or TableMismatch for one that lacks columns."""
    path = path_of(root, table.name)
    if not exists(spark, path):
        raise InputMissing(f"no table {table.name} in {root}", hint="`harvester pipeline lake` makes it")
    rows = spark.read.format("delta").load(path)
    missing, problems = schemas.differences(rows.schema, table.schema)
    if missing or problems:
        said = "; ".join([*(f"no column {'.'.join(one.path)}" for one in missing), *problems])
        raise TableMismatch(f"the table {path} has another schema: {said}", hint="run `harvester pipeline lake` first")
    return rows


def lake_header(spark: SparkSession, root: str) -> str:
    """The name of the harvester's header in a lake; raises as `load` does, and TableMismatch for one of an old form."""
    if exists(spark, path_of(root, "bronze")):
        raise TableMismatch(f"{root} is a lake of an earlier version", hint=REBUILD)
    load(spark, root, schemas.SILVER_TABLE)
    return properties(spark, path_of(root, "silver")).get(HEADER, "harvester")


def _check(spark: SparkSession, path: str, table: Table, owner: str | None) -> list[schemas.Addition] | None:
    """The columns to add; None where there is no table yet."""
    if not exists(spark, path):
        return None
    missing, problems = schemas.differences(spark.read.format("delta").load(path).schema, table.schema)
    if (found := partitioning(spark, path)) != table.partitioned_by:
        by = ", ".join(table.partitioned_by) or "nothing"
        problems.append(f"it is partitioned by {', '.join(found) or 'nothing'}, not by {by}")
    if problems:
        raise TableMismatch(
            f"the table {path} has another schema: {'; '.join(problems)}",
            hint="write to another directory, or mend the table",
        )
    if owner is not None and properties(spark, path).get(OWNER) != owner:
        raise TableMismatch(
            f"the table {path} was filled through another checkpoint",
            hint=FOREIGN,
        )
    return missing
