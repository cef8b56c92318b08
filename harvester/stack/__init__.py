"""Real servers for the demo and the tests, without containers: one PostgreSQL and one Apache Kafka broker.

A *stack* is a directory. `up` makes it run (and is idempotent), `down` stops what `up` started and nothing else,
`status` tells how it stands. The servers run in sessions of their own and survive the process that started them;
`state.json` in the directory names them by pid *and* start time, so a recycled pid is never signalled.

Everything listens on loopback only and trusts whoever connects there: for development, never for production.

The pieces: `processes` (identity of a process), `state` (the file), `java` and `jars` (what Kafka needs),
`postgres` and `kafka` (one server each), `stack` (the two together).
"""

from __future__ import annotations

from harvester.stack.jars import broker_jars
from harvester.stack.stack import down, start, status, stop, up
from harvester.stack.state import (
    ServerName,
    ServerStatus,
    StackInfo,
    StackOptions,
    StackStatus,
    TlsFiles,
    default_directory,
)

__all__ = [
    "ServerName",
    "ServerStatus",
    "StackInfo",
    "StackOptions",
    "StackStatus",
    "TlsFiles",
    "broker_jars",
    "default_directory",
    "down",
    "start",
    "status",
    "stop",
    "up",
]
