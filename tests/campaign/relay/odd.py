"""Writers that do what the pump does not, but applications do, for as long as a campaign lasts.

- `OddWriter`: two-phase commits, savepoints, keys whose records go to several topics, rows with extreme or malformed
  columns, all with `synchronous_commit = off`, so that a crash of the server may undo what is not flushed.
- `IdleWriter`: one transaction that has written to the outbox and stays open, so that no gap in the ids ever closes.

Both number their rows by `audit.write`, and begin anew after any trouble with the database.
"""

from __future__ import annotations

import contextlib
import random
import select
import threading
import time
from typing import Any

import psycopg

from harvester.verify.load import COMMITTED, LATE, ROLLED_BACK

Connection = psycopg.Connection[Any]

_PACE_S = 0.05
_RETRY_S = 0.3
_LOOK_S = 0.5
_PREPARED = "campaign-"  # what its prepared transactions are called
_PREPARED_FOR_S = (0.0, 3.0)
_KEYS = 12
_CREATED = ("infinity", "-infinity", "294276-12-31 23:59:59Z", "4713-01-01 00:00:00Z BC", "1970-01-01 00:00:00Z")
# (header keys, header values, partition); what is no record goes to quarantine.
_COLUMNS: tuple[tuple[list[str | None], list[str | None], int | None], ...] = (
    ([], [], None),
    (["a", "ü"], ["1", ""], None),
    (["a", None], ["1", "2"], None),
    (["a"], ["1", "2"], None),
    ([], [], 99),
    ([], [], -7),
)


class OddWriter(threading.Thread):
    """Write until `stop`, a few dozen rows a second."""

    def __init__(self, dsn: str, topics: tuple[str, ...], seed: int) -> None:
        super().__init__(name="odd writer", daemon=True)
        self._dsn, self._topics, self._rng = dsn, topics, random.Random(f"odd {seed}")
        self._ending = threading.Event()
        self._prepared: dict[str, float] = {}  # when each is to be committed or rolled back

    def stop(self, timeout_s: float = 60.0) -> None:
        """End, with nothing left prepared; the database must be reachable."""
        self._ending.set()
        self.join(timeout_s)
        assert not self.is_alive(), "the odd writer does not end: is its server frozen?"

    def run(self) -> None:
        while True:
            with contextlib.suppress(psycopg.Error), _connect(self._dsn) as connection:
                connection.execute("SET synchronous_commit = off")
                while not self._ending.wait(_PACE_S):
                    self._write(connection)
                    self._settle(connection, time.monotonic())
                self._settle(connection, float("inf"))
                return
            time.sleep(_RETRY_S)

    def _write(self, connection: Connection) -> None:
        rng = self._rng
        match rng.choice(("topics", "topics", "savepoints", "odd row", "two phases")):
            case "topics":
                with connection.transaction():
                    for _ in range(rng.randint(1, 3)):
                        self._row(connection, "m", topic=rng.choice(self._topics))
            case "savepoints":
                with connection.transaction():
                    self._row(connection, "s")
                    with connection.transaction(force_rollback=True):
                        self._row(connection, "s", ROLLED_BACK)
                        with connection.transaction():
                            self._row(connection, "s", ROLLED_BACK)
                    with connection.transaction():
                        self._row(connection, "s")
            case "odd row":
                header_keys, header_values, partition = rng.choice(_COLUMNS)
                self._row(connection, "o", COMMITTED, None, rng.choice(_CREATED), header_keys, header_values, partition)
            case "two phases":
                self._prepare(connection)

    def _row(
        self, connection: Connection, prefix: str, kind: str = COMMITTED, topic: str | None = None, *odd: Any
    ) -> None:
        number = self._rng.randrange(_KEYS)
        values = [f"{prefix}-{number:06d}", topic or self._topics[number % len(self._topics)], kind, *odd]
        connection.execute(f"SELECT audit.write({', '.join(['%s'] * len(values))})", values)

    def _prepare(self, connection: Connection) -> None:
        """One at a time: it keeps the locks on its keys."""
        if self._prepared:
            return
        name = f"{_PREPARED}{self._rng.randrange(10**9)}"
        self._prepared[name] = time.monotonic() + self._rng.uniform(*_PREPARED_FOR_S)
        connection.execute("BEGIN")
        self._row(connection, "p", LATE)
        self._row(connection, "p", LATE)
        connection.execute(f"PREPARE TRANSACTION '{name}'")

    def _settle(self, connection: Connection, now: float) -> None:
        """End what is due. What is unknown here and prepared all the same was left behind by a session that died."""
        due = [name for name, at in self._prepared.items() if at <= now]
        if not due and self._prepared:
            return
        query = "SELECT gid FROM pg_prepared_xacts WHERE starts_with(gid, %s)"
        standing = {row[0] for row in connection.execute(query, (_PREPARED,))} if due or now == float("inf") else set()
        for name in standing:
            verb = "ROLLBACK" if self._rng.random() < 0.3 else "COMMIT"
            connection.execute(f"{verb} PREPARED '{name}'")
        for name in due:
            self._prepared.pop(name, None)


class IdleWriter(threading.Thread):
    """Keep a transaction open that has written; `aside` lets go of it for a statement that needs the table alone."""

    def __init__(self, dsn: str) -> None:
        super().__init__(name="idle writer", daemon=True)
        self._dsn = dsn
        self._ending = threading.Event()
        self._wanted = threading.Event()
        self._wanted.set()

    def stop(self) -> None:
        """Roll it back, and end."""
        self._ending.set()
        if self.ident is not None:
            self.join(30.0)

    @contextlib.contextmanager
    def aside(self) -> Any:
        """No such transaction is open in this block, or soon after it began."""
        self._wanted.clear()
        try:
            yield
        finally:
            self._wanted.set()

    def run(self) -> None:
        while not self._ending.is_set():
            if self._wanted.wait(_LOOK_S):
                with contextlib.suppress(psycopg.Error), _connect(self._dsn) as connection:
                    self._hold(connection)
            self._ending.wait(_RETRY_S)

    def _hold(self, connection: Connection) -> None:
        with connection.transaction(force_rollback=True):
            connection.execute(
                "INSERT INTO outbox (create_time, kafka_topic, kafka_key, kafka_value)"
                " VALUES (now(), 'campaign-idle', NULL, 'never committed')"
            )
            # Not one statement while it waits: what is noticed is the end of the connection.
            while not self._ending.is_set() and self._wanted.is_set():
                if select.select([connection.fileno()], [], [], _LOOK_S)[0]:
                    return


def _connect(dsn: str) -> Connection:
    return psycopg.connect(dsn, autocommit=True, connect_timeout=5, application_name="campaign odd")
