"""The output: a table for people on standard error, one line of JSON for programs on standard output."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from functools import cache
from importlib import metadata
from typing import Any

import confluent_kafka
import psycopg
from rich.console import Console
from rich.table import Table

from scripts.benchmarks._place import ROOT
from scripts.benchmarks._scenario import Bench, Samples


def show(name: str, about: str, bench: Bench, samples: Samples) -> None:
    """Draw the table."""
    table = Table(title=f"{name}: {about}", title_justify="left", caption=_caption(bench), caption_justify="left")
    table.add_column("figure")
    for column in ("median", "min", "max"):
        table.add_column(column, justify="right")
    for figure, median, least, most, values in samples.rows():
        spread = (_text(least), _text(most)) if values > 1 else ("", "")
        table.add_row(figure, _text(median), *spread)
    Console(stderr=True).print(table)


def line(name: str, bench: Bench, samples: Samples) -> dict[str, Any]:
    """What is printed as JSON."""
    return {
        "scenario": name,
        "figures": samples.figures(),
        "rounds": bench.rounds,
        "settings": {
            "records": bench.records,
            "shards": list(bench.shards) or None,
            "seconds": bench.seconds,
            "minutes": bench.minutes,
            "set": list(bench.settings),
            "variants": {variant: list(settings) for variant, settings in samples.used.items()},
        },
        "versions": versions(bench),
        **({"notes": samples.notes} if samples.notes else {}),
    }


def versions(bench: Bench) -> dict[str, Any]:
    """What was measured, with what, on what."""
    return {**_software(), "postgresql": _postgresql(bench.dsn), "kafka": _kafka()}


@cache
def _software() -> dict[str, Any]:
    return {
        "harvester": metadata.version("outbox-harvester"),
        "commit": _commit(),
        "python": platform.python_version(),
        "psycopg": psycopg.__version__,
        "confluent_kafka": confluent_kafka.version()[0]
        if isinstance(confluent_kafka.version(), tuple)
        else confluent_kafka.version(),
        "librdkafka": confluent_kafka.libversion()[0],
        "cores": os.cpu_count(),
        "kernel": platform.release(),
    }


@cache
def _postgresql(dsn: str) -> str | None:
    try:
        with psycopg.connect(dsn) as connection:
            return str(connection.info.parameter_status("server_version"))
    except psycopg.OperationalError:
        return None


def _kafka() -> str:
    from harvester.stack.java import KAFKA_VERSION

    return os.environ.get("HARVESTER_KAFKA_JARS") or KAFKA_VERSION


def _commit() -> str | None:
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()


def _caption(bench: Bench) -> str:
    parts = [f"{bench.records:,} records", f"{bench.rounds} round{'s' if bench.rounds > 1 else ''}", *bench.settings]
    return ", ".join(parts)


def _text(value: float) -> str:
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 10 else f"{value:.1f}"


def dumps(value: dict[str, Any]) -> str:
    """One line."""
    return json.dumps(value)
