"""Classes of Spark's Java process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def java_class(spark: SparkSession, name: str) -> Any:
    """Returns a class of the Java process by its full name.

    `_jvm.org.apache.…` would look for each package as a class first, in every jar.
    """
    return getattr(spark.sparkContext._jvm, name)
