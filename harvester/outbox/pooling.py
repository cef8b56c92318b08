"""Whether a session is one of its own, or a pooler lends it a backend for each transaction. Thin.

The relay cannot do with the latter. Settings that it makes for its session (`synchronous_commit`, timeouts) would be
those of another transaction's backend, and stay there for whoever gets it next; prepared statements would be unknown;
notifications would go to nobody. Above all, the sessions that the term row names would be backends that others are
using: a new leader ends them (P7).
"""

from __future__ import annotations

from contextlib import closing
from typing import Any

import psycopg

from harvester.outbox.connect import connect

LENT = "a pooler in transaction (or statement) mode stands between the harvester and PostgreSQL"
LENT_HINT = "point data_source at PostgreSQL itself, or at a pool in session mode; applications may stay behind it"
_LOOKS = 5  # a pool may have several backends to lend


def is_pooled(connection: psycopg.Connection[Any]) -> bool:
    """Whether there is a pooler of any kind: it tells its clients a pid of its own."""
    return _pid(connection) != connection.info.backend_pid


def lends_backends(connection: psycopg.Connection[Any], dsn: str, application_name: str) -> bool:
    """Whether two sessions that are open at once were served by one backend, or one session by two.

    `dsn` is what `connection` was made with; it must be in autocommit, outside a transaction. Where a pooler is
    evident, it is looked at several times. Raises what `connect` does, and psycopg's errors.
    """
    ours = _pid(connection)
    for _ in range(_LOOKS if is_pooled(connection) else 1):
        with closing(connect(dsn, application_name=application_name)) as other:
            theirs, again = _pid(other), _pid(connection)
        if theirs in (ours, again) or again != ours:
            return True
    return False


def _pid(connection: psycopg.Connection[Any]) -> int:
    row = connection.execute("SELECT pg_backend_pid()").fetchone()
    return int(row[0]) if row is not None else 0
