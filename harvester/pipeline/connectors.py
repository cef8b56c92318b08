"""The connectors' jars for the installed Spark, from the cache that the embedded broker's jars are in."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from harvester.pipeline import versions
from harvester.pipeline.errors import SparkUnavailable
from harvester.stack import ivy

JARS = "HARVESTER_SPARK_JARS"
# What Spark itself brings along: a second copy of these in another version would be loaded first.
_OF_SPARK = ("org.apache.hadoop", "org.scala-lang", "org.slf4j", "org.lz4", "org.xerial.snappy", "org.antlr")


def connector_jars(pyspark_version: str, *, progress: Callable[[str], None] = lambda _: None) -> list[Path]:
    """Kafka source, Delta Lake, PostgreSQL driver and what they need; downloads them (20 MB) the first time.

    $HARVESTER_SPARK_JARS names a directory of your own. Raises ConnectorMismatch, SparkUnavailable, StackError.
    """
    if given := os.environ.get(JARS):
        jars = sorted(Path(given).absolute().glob("*.jar"))
        if not any("spark-sql-kafka" in jar.name for jar in jars):
            raise SparkUnavailable(
                f"{JARS}={given}: no Kafka connector of Spark there",
                hint="name a directory with the connectors' jars, or unset it",
            )
        versions.check(pyspark_version, (jar.name for jar in jars))
        return jars
    wanted = versions.connectors(pyspark_version)
    home = ivy.cached(
        "spark-" + "-".join((pyspark_version, *(coordinate.version for coordinate in wanted[1:]))),
        _module(wanted),
        what="the connectors of Spark",
        hints=(
            "pip install 'harvester[spark]'",
            f"it needs the network once; {JARS} names a directory with jars you already have",
        ),
        announce=lambda: progress(f"fetching the connectors of Spark {pyspark_version} (20 MB, once)"),
    )
    return sorted(home.glob("*.jar"))


def _module(wanted: tuple[versions.Coordinate, ...]) -> str:
    lines = [
        f'    <dependency org="{one.group}" name="{one.artifact}" rev="{one.version}" conf="default->default"/>'
        for one in wanted
    ]
    lines += [f'    <exclude org="{group}"/>' for group in _OF_SPARK]
    return (
        '<ivy-module version="2.0">\n'
        '  <info organisation="harvester" module="connectors"/>\n'
        '  <configurations><conf name="default"/></configurations>\n'
        "  <dependencies>\n" + "\n".join(lines) + "\n  </dependencies>\n</ivy-module>\n"
    )
