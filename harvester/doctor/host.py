"""This machine: cores, limits, versions, Java. Thin."""

from __future__ import annotations

import os
import platform
import resource
from collections.abc import Sequence

from harvester.doctor.facts import Host, Java
from harvester.errors import HarvesterError


def read_host() -> Host:
    """What the harvester's processes would be given here."""
    import confluent_kafka
    import psycopg

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Host(
        cores=len(os.sched_getaffinity(0)),
        open_files=None if soft == resource.RLIM_INFINITY else soft,
        python=platform.python_version(),
        kafka_client=f"librdkafka {confluent_kafka.libversion()[0]}",
        postgres_client=f"libpq {_dotted(psycopg.pq.version())}",
    )


def read_java(commands: Sequence[str]) -> list[Java]:
    """For each of `stack` and `pipeline` the Java that it would use."""
    return [_java(command) for command in commands]


def _java(command: str) -> Java:
    from harvester.stack import java

    try:
        if command == "pipeline":
            from harvester.pipeline.session import NEWEST_JAVA, spark_version

            spark_version()  # raises where Spark is not installed
            return Java(command, java.find(newest=NEWEST_JAVA).major)
        return Java(command, java.find().major)
    except HarvesterError as error:
        return Java(command, None, error.message, error.hint)


def _dotted(version: int) -> str:
    return f"{version // 10000}.{version % 10000}"
