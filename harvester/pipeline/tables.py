"""Small files next to tables, the names of table properties, and classes of Spark's Java process.

Files are accessed through Hadoop's file systems, alike for local disks, HDFS and object stores.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for it
from pyspark.sql.types import TimestampType

_FILES = "org.apache.hadoop.fs"


def java_class(spark: SparkSession, name: str) -> Any:
    """A class of Spark's Java process, by its fully qualified name.

    `_jvm.org.apache.…` would first search every jar for a class with the name of each package.
    """
    return getattr(spark.sparkContext._jvm, name)


def listing(spark: SparkSession, path: str) -> list[str]:
    """The names in a directory; [] if it does not exist."""
    place, system = _open(spark, path)
    if not system.exists(place):
        return []
    return [status.getPath().getName() for status in system.listStatus(place)]


def read_text(spark: SparkSession, path: str) -> str | None:
    """The text of a file; None if it does not exist."""
    place, system = _open(spark, path)
    if not system.exists(place):
        return None
    stream = system.open(place)
    try:
        return str(java_class(spark, "org.apache.commons.io.IOUtils").toString(stream, "UTF-8"))
    finally:
        stream.close()


def write_text(spark: SparkSession, path: str, text: str) -> None:
    """Replaces a file: atomically on a local disk, HDFS and S3, so that a job that dies halfway leaves the old file.

    Elsewhere the connector may remove the old file before it renames the new one.
    """
    content = bytearray(text.encode())
    place, system = _open(spark, path)
    if is_object_store(spark, path):
        # The file appears when the stream is closed, unless the stream is aborted before.
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
        # Hadoop keeps a file of checksums next to a local file, and would rename one after the other.
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


def is_object_store(spark: SparkSession, path: str) -> bool:
    """Whether files appear atomically there, and renaming copies them."""
    place, system = _open(spark, path)
    return bool(system.hasPathCapability(place, "fs.capability.outputstream.abortable"))


def remove(spark: SparkSession, paths: Iterable[str]) -> None:
    """Removes files, if they exist."""
    for path in paths:
        place, system = _open(spark, path)
        system.delete(place, False)


def move(spark: SparkSession, source: str, target: str) -> None:
    """Renames a directory to an unused name."""
    (place, system), (to, _) = _open(spark, source), _open(spark, target)
    if not system.rename(place, to):
        raise OSError(f"{source} could not be renamed to {target}")


def copy(spark: SparkSession, source: str, target: str) -> None:
    """Copies a directory to an unused name."""
    (place, system), (to, there) = _open(spark, source), _open(spark, target)
    java_class(spark, f"{_FILES}.FileUtil").copy(system, place, there, to, False, _configuration(spark))


def _open(spark: SparkSession, path: str) -> tuple[Any, Any]:
    place = java_class(spark, f"{_FILES}.Path")(path)
    return place, place.getFileSystem(_configuration(spark))


def _configuration(spark: SparkSession) -> Any:
    return spark.sparkContext._jsc.hadoopConfiguration()


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def instant(microseconds: int | None) -> datetime | None:
    """The UTC time of microseconds since the epoch, or the nearest time that a datetime can hold."""
    if microseconds is None:
        return None
    try:
        return _EPOCH + timedelta(microseconds=microseconds)
    except OverflowError:
        return datetime(9999, 12, 31, tzinfo=UTC) if microseconds > 0 else datetime(1, 1, 1, tzinfo=UTC)


def collected(frame: DataFrame) -> list[dict[str, Any]]:
    """The rows, with timestamps in UTC; Spark itself would return them in the time zone of this machine."""
    times = [field.name for field in frame.schema if isinstance(field.dataType, TimestampType)]
    rows = frame.withColumns({name: F.unix_micros(name) for name in times}).collect()
    return [row.asDict() | {name: instant(row[name]) for name in times} for row in rows]


OWNER = "harvester.lake"
"""The table property that names the owning checkpoint: only that one may continue to write to the table."""
HEADER = "harvester.header"
"""The name of the header from which the columns were decoded; views need it to reconstruct the header."""
FOLDED = "harvester.folded"
"""On `current`: the last batch of silver whose states were folded into it."""
AGAIN = "harvester.again"
"""On silver: the last batch that was abandoned half written, whose records are read again."""
TOPICS = "harvester.topics"
"""On silver: Kafka's ids of the topics read, and since which batch; needed if the checkpoint is lost."""
CHECKPOINT = "harvester.checkpoint"
"""On silver in a schema: the location of the checkpoint, and of the files that a directory has next to its tables."""
WRITTEN = "harvester.written"
"""On an Iceberg table: its last batch, as of when the snapshots that recorded it were removed."""
COUNTED = "harvester.counted"
"""On `metrics`: what the last run has seen of the lake, and its settings."""

REBUILD = "`harvester pipeline rebuild --from OLD --to NEW` converts it, after its job has ended"

FOREIGN = "use that checkpoint; if it is lost, `harvester pipeline lake --adopt` creates a new one from the tables"


def path_of(root: str, name: str) -> str:
    """The directory of a table."""
    return f"{root.rstrip('/')}/{name}"
