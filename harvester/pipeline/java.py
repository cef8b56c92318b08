"""Looks up classes in Spark's Java process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def java_class(spark: SparkSession, name: str) -> Any:
    """Returns a class by its fully qualified name.

    `_jvm.org.apache.…` would first search every jar for a class with the name of each package.
    """
    return getattr(spark.sparkContext._jvm, name)
