"""Faults of database sessions: terminated, kept waiting by locks, chosen as a deadlock's victim; a TRUNCATE."""

from __future__ import annotations

import contextlib
import random
import time

import psycopg

from .field import Field

_TRIES = 10


def terminate(field: Field, rng: random.Random) -> str | None:
    """End some of the harvesters' sessions, or all."""
    with contextlib.suppress(psycopg.Error), field.connect() as connection:
        query = """SELECT pid FROM pg_stat_activity WHERE datname = current_database()
                   AND application_name LIKE 'harvester h%' ORDER BY pid"""
        pids = [row[0] for row in connection.execute(query)]
        chosen = rng.sample(pids, rng.randint(1, len(pids))) if pids else []
        for pid in chosen:
            connection.execute("SELECT pg_terminate_backend(%s)", (pid,))
        return f"{len(chosen)} sessions" if chosen else None
    return None


def lock_rows(field: Field, hold_s: float, rng: random.Random) -> str | None:
    """Lock some rows, wherever they stand; what is purged meanwhile is left alone."""
    with contextlib.suppress(psycopg.Error), field.connect() as connection, connection.transaction():
        query = "SELECT id FROM (SELECT id FROM outbox ORDER BY random() LIMIT %s) AS some ORDER BY id"
        ids = [row[0] for row in connection.execute(query, (rng.randint(1, 20),))]
        locked = connection.execute(
            "SELECT id FROM outbox WHERE id = ANY(%s) ORDER BY id FOR UPDATE SKIP LOCKED", (ids,)
        ).fetchall()
        time.sleep(hold_s)
        return f"{len(locked)} rows"
    return None


def deadlock(field: Field, hold_s: float) -> str | None:
    """Lock rows against the order that everybody else keeps, until somebody is the victim."""
    deadline = time.monotonic() + hold_s
    victims = 0
    while time.monotonic() < deadline:
        try:
            with field.connect() as connection, connection.transaction():
                for order in ("DESC", "ASC"):
                    query = f"SELECT id FROM outbox ORDER BY id {order} LIMIT 20"
                    for (row_id,) in connection.execute(query).fetchall():
                        connection.execute("SELECT FROM outbox WHERE id = %s FOR UPDATE", (row_id,))
                    time.sleep(0.1)
        except psycopg.errors.DeadlockDetected:
            victims += 1
        except psycopg.Error:
            return None
    return f"rows from the end ({victims} times the victim itself)"


def truncate(field: Field, *, restart: bool) -> str | None:
    """Empty the outbox under living writers, with or without `RESTART IDENTITY`; the rows are noted by the audit."""
    identity = "RESTART IDENTITY" if restart else "CONTINUE IDENTITY"
    with field.idle.aside(), contextlib.suppress(psycopg.Error), field.connect() as connection:
        connection.execute("SET lock_timeout = '500ms'")  # whoever is to end a prepared transaction waits behind it
        for _ in range(_TRIES):
            with contextlib.suppress(psycopg.errors.LockNotAvailable):
                connection.execute(f"TRUNCATE outbox {identity}")
                return "outbox"
    return None
