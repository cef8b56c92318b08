"""Small files where the lake is, by Hadoop's file systems: the same for a local disk, HDFS and object stores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
