"""The command lines of Spark's daemons, and the cluster as its master reports it."""

from __future__ import annotations

import importlib.util
import json
import os
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harvester.pipeline.errors import SparkUnavailable
from harvester.pipeline.session import NEWEST_JAVA
from harvester.stack import java

HOST = "127.0.0.1"
# What Spark's own scripts open for it in the runtime (org.apache.spark.launcher.JavaModuleOptions), as daemons need it.
_OPENED = ("java.lang", "java.net", "java.nio", "java.util", "java.util.concurrent", "sun.nio.ch", "sun.util.calendar")
_SMALL = ("-Xms32m", "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xss512k")


@dataclass(frozen=True, slots=True)
class Size:
    """What each worker has to give."""

    cores: int = 1
    memory_mb: int = 1024


def spark_home() -> Path:
    """PySpark's directory, with the jars in it."""
    found = importlib.util.find_spec("pyspark")
    if found is None or found.origin is None:
        raise SparkUnavailable("a cluster needs Apache Spark", hint="pip install 'outbox-harvester[spark]'")
    return Path(found.origin).parent


def environment(directory: Path) -> dict[str, str]:
    """For the daemons and the executors that they start."""
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(("SPARK_", "PYSPARK_"))},
        "SPARK_HOME": str(spark_home()),
        "SPARK_SCALA_VERSION": "2.13",  # without it a worker looks for the directories of a build, and starts nothing
        "JAVA_HOME": str(_java().resolve().parents[1]),
        "SPARK_LOCAL_IP": HOST,
        "SPARK_LOCAL_DIRS": str(directory / "scratch"),
    }


def master(port: int, ui: int) -> list[str]:
    """Ends at once where a port is taken: another one would not be known."""
    options = ("-Dspark.port.maxRetries=0",)
    return [*_program(*options), "org.apache.spark.deploy.master.Master", *_listening(port, ui)]


def worker(directory: Path, number: int, master_port: int, size: Size) -> list[str]:
    """On ports that the kernel chooses."""
    return [
        *_program(),
        "org.apache.spark.deploy.worker.Worker",
        *_listening(0, 0),
        *("--cores", str(size.cores), "--memory", f"{size.memory_mb}m"),
        *("--work-dir", str(directory / f"work-{number}")),
        f"spark://{HOST}:{master_port}",
    ]


def answers(ui: int) -> bool:
    """Whether the master's page is there."""
    return _ask(ui) is not None


def workers(ui: int) -> set[str]:
    """The ids of the workers that the master holds for alive."""
    said = _ask(ui) or {}
    return {str(worker["id"]) for worker in said.get("workers", ()) if worker.get("state") == "ALIVE"}


def _ask(ui: int) -> dict[str, Any] | None:
    try:
        with urllib.request.urlopen(f"http://{HOST}:{ui}/json/", timeout=5) as answer:
            said: dict[str, Any] = json.load(answer)
    except (OSError, ValueError):
        return None
    return said


def _java() -> Path:
    return java.find(newest=NEWEST_JAVA).program


def _program(*options: str) -> list[str]:
    opened = [f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in _OPENED]
    return [str(_java()), *_SMALL, *opened, *options, "-cp", str(spark_home() / "jars" / "*")]


def _listening(port: int, ui: int) -> tuple[str, ...]:
    return ("--host", HOST, "--port", str(port), "--webui-port", str(ui))
