"""Runs real servers for the demo and the tests, without containers: one PostgreSQL and one Apache Kafka broker.

A *stack* is a directory. `up` starts it (idempotently), `down` stops what `up` started and nothing else, `status`
reports on it. The servers run in their own sessions and survive the process that started them; `state.json` in the
directory identifies them by pid *and* start time, so a recycled pid is never signalled.

Everything listens only on loopback and trusts everyone who connects there: for development, never for production.

`processes` identifies processes, `state` is the file, `java` finds the runtime and fetches
the jars, `postgres` and `kafka` are one server each, `stack` is both together.
"""

from __future__ import annotations

from harvester.stack.java import broker_jars
from harvester.stack.stack import down, start, status, stop, up
from harvester.stack.state import (
    ServerName,
    ServerStatus,
    StackInfo,
    StackOptions,
    StackStatus,
    default_directory,
)

__all__ = [
    "ServerName",
    "ServerStatus",
    "StackInfo",
    "StackOptions",
    "StackStatus",
    "broker_jars",
    "default_directory",
    "down",
    "start",
    "status",
    "stop",
    "up",
]
