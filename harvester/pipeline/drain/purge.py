"""Purges what a drain has sent, by several sessions; each runs the relay's own statement, which archives as well."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from uuid import UUID

import psycopg

from harvester.errors import DatabaseUnavailable, TermLost
from harvester.outbox.connection import database_errors
from harvester.outbox.purge_session import PoisonRow, PurgeSession, QuarantineOutcome, Rules
from harvester.outbox.tables import OutboxTable

_CHUNK_RECORDS = 5_000
_ATTEMPTS = 10
_AGAIN_S = 1.0


class Purgers:
    """The sessions, and a thread for each. Methods raise DatabaseUnavailable, SchemaError, TermLost."""

    def __init__(
        self, dsn: str, table: OutboxTable, rules: Rules, server: str | None, term: int, sessions: int
    ) -> None:
        self._sessions = [PurgeSession(dsn, table, f"harvester drain/{number}", rules) for number in range(sessions)]
        for session in self._sessions:
            session.expect(server, term)
        self._pool = ThreadPoolExecutor(sessions, thread_name_prefix="purge")

    def close(self) -> None:
        """End the sessions, once what runs has ended."""
        self._pool.shutdown()
        for session in self._sessions:
            session.close()

    def purge(self, ids: Sequence[int], waiting: Callable[[str], None]) -> list[Future[None]]:
        """Deletes these rows (ascending), which Kafka has acknowledged."""
        chunks = [ids[at : at + _CHUNK_RECORDS] for at in range(0, len(ids), _CHUNK_RECORDS)]
        count = len(self._sessions)
        return [
            self._pool.submit(_purge, session, chunks[number::count], waiting)
            for number, session in enumerate(self._sessions)
        ]

    def quarantine(self, record_id: int, error: str, attempts: int, term: int, holder: UUID) -> bool:
        """Moves one row to quarantine; False: it was gone."""
        poison = PoisonRow(record_id, error, attempts, datetime.now(UTC), term, str(holder))
        session = self._sessions[0]
        outcome: QuarantineOutcome | None = None

        def move() -> None:
            nonlocal outcome
            outcome = session.quarantine(poison)

        _insist(session, move, f"move record {record_id} to quarantine")
        if outcome is QuarantineOutcome.FENCED:
            raise TermLost(f"term {term} of this drain has ended: somebody else has taken it")
        return outcome is QuarantineOutcome.MOVED


def _purge(session: PurgeSession, chunks: Sequence[Sequence[int]], waiting: Callable[[str], None]) -> None:
    locked: Sequence[int]

    def delete() -> None:
        nonlocal locked
        try:
            session.delete(locked)
            locked = ()
        except psycopg.errors.LockNotAvailable:
            session.ready()
            locked = session.delete_unlocked(locked)

    for chunk in chunks:
        locked = chunk
        while locked:
            _insist(session, delete, "purge what was sent")
            if locked:
                waiting(f"{len(locked)} records that were sent are locked by another session")


def _insist(session: PurgeSession, action: Callable[[], None], what: str) -> None:
    """Repeats the action in a new session when the session was lost, for a while."""
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            with database_errors(what):
                session.ready()
                action()
            return
        except DatabaseUnavailable:
            if attempt == _ATTEMPTS:
                raise
            time.sleep(_AGAIN_S)
