"""The Delta tables of a lake, and small files beside them: made, checked, and opened under one lake's name.

Small files where the lake is, by Hadoop's file systems: the same for a local disk, HDFS and object stores.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from harvester.pipeline import schemas
from harvester.pipeline.errors import TableMismatch
from harvester.pipeline.schemas import Table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


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
        return str(_jvm(spark).org.apache.commons.io.IOUtils.toString(stream, "UTF-8"))
    finally:
        stream.close()


def write_text(spark: SparkSession, path: str, text: str) -> None:
    """Replace a file, all at once where the file system can rename."""
    place, system = _open(spark, path)
    aside = _jvm(spark).org.apache.hadoop.fs.Path(f"{path}.new")
    stream = system.create(aside, True)
    try:
        stream.write(bytearray(text.encode()))
    finally:
        stream.close()
    rename = _jvm(spark).org.apache.hadoop.fs.Options.Rename
    overwrite = spark.sparkContext._gateway.new_array(rename, 1)  # type: ignore[union-attr]
    overwrite[0] = rename.OVERWRITE
    context = _jvm(spark).org.apache.hadoop.fs.FileContext.getFileContext(system.getUri(), _configuration(spark))
    context.rename(context.makeQualified(aside), context.makeQualified(place), overwrite)


def _open(spark: SparkSession, path: str) -> tuple[Any, Any]:
    place = _jvm(spark).org.apache.hadoop.fs.Path(path)
    return place, place.getFileSystem(_configuration(spark))


def _configuration(spark: SparkSession) -> Any:
    return spark.sparkContext._jsc.hadoopConfiguration()


def _jvm(spark: SparkSession) -> Any:
    return spark.sparkContext._jvm


OWNER = "harvester.lake"
"""The table property that names the lake's checkpoint: what filled a table, alone may go on filling it."""

_BOUNDED = "delta.dataSkippingStatsColumns"
_LAYOUT = {"delta.enableDeletionVectors": "true"}


def prepare(spark: SparkSession, root: str, tables: Iterable[Table], owner: str) -> None:
    """Make what is missing, add columns that are new; TableMismatch for anything else, before anything is changed."""
    wanted = list(tables)
    additions = {table.name: _check(spark, path_of(root, table.name), table, owner) for table in wanted}
    for table in wanted:
        path, missing = path_of(root, table.name), additions[table.name]
        if missing is None:
            bounded = {_BOUNDED: ",".join(table.bounded)} if table.bounded else {}
            spark.sql(schemas.create(path, table, {**_LAYOUT, **bounded, OWNER: owner}))
        elif missing:
            spark.sql(schemas.add_columns(path, missing))


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


def _check(spark: SparkSession, path: str, table: Table, owner: str) -> list[schemas.Addition] | None:
    """The columns to add; None where there is no table yet."""
    if not exists(spark, path):
        return None
    detail = spark.sql(f"DESCRIBE DETAIL {schemas.at(path)}").select("partitionColumns", "properties").first()
    assert detail is not None
    missing, problems = schemas.differences(spark.read.format("delta").load(path).schema, table.schema)
    if tuple(detail["partitionColumns"]) != table.partitioned_by:
        by = ", ".join(table.partitioned_by) or "nothing"
        problems.append(f"it is partitioned by {', '.join(detail['partitionColumns']) or 'nothing'}, not by {by}")
    if problems:
        raise TableMismatch(
            f"the table {path} has another schema: {'; '.join(problems)}",
            hint="write to another directory, or mend the table",
        )
    if detail["properties"].get(OWNER) != owner:
        raise TableMismatch(
            f"the table {path} was filled through another checkpoint",
            hint="go on with that checkpoint; a new one would read the topics again, into a directory of its own",
        )
    return missing
