"""For tests of the inbox: forged messages, and an application whose effects are rows of a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import psycopg

from harvester.idempotence import Inbox
from harvester.origin import HEADER, Origin, encode

ONE, TWO = UUID(int=1), UUID(int=2)


@dataclass(frozen=True)
class Forged:
    """A message as confluent_kafka gives it."""

    at: int
    header: bytes | None = None
    place: tuple[str, int] = ("orders", 0)
    trouble: str | None = None

    def topic(self) -> str | None:
        return self.place[0]

    def partition(self) -> int | None:
        return self.place[1]

    def offset(self) -> int | None:
        return self.at

    def key(self) -> bytes | None:
        return None

    value = key

    def headers(self) -> list[tuple[str, bytes | None]] | None:
        return None if self.header is None else [("other", b"x"), (HEADER, self.header)]

    def error(self) -> Any:
        return self.trouble


def stamped(
    record_id: int, incarnation: UUID = ONE, low_water: int | None = None, term: int = 1, sequence: int = 1
) -> bytes:
    """A header as the relay writes it."""
    return encode(Origin(incarnation, record_id, term, 0, 1, sequence, 1_700_000_000_000_000, low_water))


class Pool:
    """A pool of one session, which is replaced when it was lost."""

    def __init__(self, dsn: str) -> None:
        self._dsn, self.session = dsn, psycopg.connect(dsn, autocommit=True)

    @contextmanager
    def connection(self) -> Iterator[psycopg.Connection[Any]]:
        if self.session.closed:
            self.session = psycopg.connect(self._dsn, autocommit=True)
        yield self.session


class Ledger:
    """An application with one connection: each effect is a row, in the order done."""

    def __init__(self, dsn: str, **options: Any) -> None:
        self.db: psycopg.Connection[Any] = psycopg.connect(dsn, autocommit=True)
        self.db.execute("CREATE TABLE IF NOT EXISTS effect (at serial, what text)")
        self.inbox = Inbox(self.db, "group", **options)
        self.inbox.create_table()

    def take(self, *messages: Forged) -> list[int]:
        """One transaction for each; the offsets whose effect was done."""
        done = []
        for message in messages:
            with self.inbox.record(message) as effect:
                if effect.is_new:
                    effect.cursor.execute("INSERT INTO effect (what) VALUES (%s)", (self.name(message),))
                    done.append(message.at)
        return done

    def take_batch(self, messages: Sequence[Forged]) -> None:
        with self.inbox.batch(messages) as batch:
            for message in batch.new:
                batch.cursor.execute("INSERT INTO effect (what) VALUES (%s)", (self.name(message),))

    @staticmethod
    def name(message: Any) -> str:
        return f"{message.partition()}@{message.offset()}"

    def effects(self) -> list[str]:
        return [row[0] for row in self.db.execute("SELECT what FROM effect ORDER BY at")]

    def row(self, partition: int = 0) -> tuple[Any, ...]:
        """(next offset, version, generation) as stored."""
        row = self.db.execute(
            "SELECT next_offset, version, generation FROM harvester_inbox WHERE partition = %s", (partition,)
        ).fetchone()
        assert row is not None
        return tuple(row)


Make = Callable[..., Ledger]
