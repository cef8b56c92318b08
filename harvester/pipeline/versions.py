"""Which connectors belong to which Spark: Maven coordinates from PySpark's version, and what does not go together."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from harvester.pipeline.errors import ConnectorMismatch

_SCALA = "2.13"
_VERSION = re.compile(r"(\d+)\.(\d+)\.\d+")
_KAFKA = re.compile(r"spark-sql-kafka-0-10_(\d+\.\d+)[-:](\d+\.\d+\.\d+)")
_DELTA_JAR = re.compile(r"delta-spark(?:_(\d+\.\d+))?_(\d+\.\d+)[-:](\d+\.\d+)")


@dataclass(frozen=True, slots=True)
class Coordinate:
    group: str
    artifact: str
    version: str

    def __str__(self) -> str:
        return f"{self.group}:{self.artifact}:{self.version}"


_POSTGRES = Coordinate("org.postgresql", "postgresql", "42.7.8")
# A Delta is built for one minor version of Spark; since 4.1 the artifact says for which. https://docs.delta.io/releases
_DELTA = {
    (4, 0): Coordinate("io.delta", f"delta-spark_{_SCALA}", "4.0.0"),
    (4, 1): Coordinate("io.delta", f"delta-spark_4.1_{_SCALA}", "4.1.0"),
}


def connectors(pyspark_version: str) -> tuple[Coordinate, ...]:
    """Kafka source, Delta Lake and PostgreSQL driver for this Spark; ConnectorMismatch if Delta has none for it."""
    return _kafka(pyspark_version), _delta(pyspark_version), _POSTGRES


def check(pyspark_version: str, jars: Iterable[str]) -> None:
    """Raise ConnectorMismatch if one of these jars (paths or coordinates) was made for another Spark or Scala.

    Jars that are none of our connectors are the user's own business.
    """
    kafka, delta = _kafka(pyspark_version), _delta(pyspark_version)
    major, minor, _ = kafka.version.split(".")
    for jar in jars:
        if found := _KAFKA.search(jar):
            fits, expected = found.groups() == (_SCALA, kafka.version), kafka
        elif found := _DELTA_JAR.search(jar):
            spark, scala, line = found.groups()
            # Without Spark's version in its name, Delta's own stands for it.
            fits, expected = scala == _SCALA and (spark or line) == f"{major}.{minor}", delta
        else:
            continue
        if not fits:
            raise ConnectorMismatch(
                f"{jar.rsplit('/', 1)[-1]} was not made for PySpark {pyspark_version}",
                hint=f"it takes {expected}; name no connectors, and the right ones are fetched",
            )


def _kafka(version: str) -> Coordinate:
    found = _VERSION.match(version)  # 4.1.0.dev3 is served by the connector of 4.1.0
    if found is None:
        raise ConnectorMismatch(f"PySpark calls its version {version!r}, which is no version of Spark")
    return Coordinate("org.apache.spark", f"spark-sql-kafka-0-10_{_SCALA}", found[0])


def _delta(version: str) -> Coordinate:
    major, minor, _ = _kafka(version).version.split(".")
    try:
        return _DELTA[int(major), int(minor)]
    except KeyError:
        known = ", ".join(f"{major}.{minor}" for major, minor in sorted(_DELTA))
        raise ConnectorMismatch(
            f"no Delta Lake is known for PySpark {version}, only for {known}",
            hint=f"pip install 'pyspark=={known.split(', ')[-1]}.*'",
        ) from None
