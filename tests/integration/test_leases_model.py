"""The SQL against the pure machine: the same runs of numbers to both, with rollbacks, savepoints, leases and expiry."""

from __future__ import annotations

import random
from typing import Any

import psycopg
import pytest

from harvester import Lease, LeaseError, LeaseExpired, LeaseFenced, LeaseUnknown, SequenceGap, Stasher
from harvester.outbox.leases import HighWaterMark, RunVerdict, judge, lease
from tests.support.leasing import end, record, values

pytestmark = pytest.mark.servers

ERRORS: dict[RunVerdict, type[LeaseError]] = {
    RunVerdict.EXPIRED: LeaseExpired,
    RunVerdict.FENCED: LeaseFenced,
    RunVerdict.UNKNOWN: LeaseUnknown,
    RunVerdict.GAP: SequenceGap,
}


class Model:
    """One name: what the machine says of it, and the log that comes of it. `at`: writers that saw the row before."""

    def __init__(self, dsn: str, connection: psycopg.Connection[Any], rng: random.Random) -> None:
        self.dsn, self.connection, self.rng = dsn, connection, rng
        self.stasher = Stasher()
        self.mark = lease(None)
        self.taken = self.stasher.lease(connection, "reader")
        self.expired = False
        self.log: list[str] = []
        self.number = 0
        self.writer = self.stasher.leased(self.taken)

    def bring(self) -> None:
        """A run near the mark, under some generation, by a writer that knows where the row is or by a new one."""
        rng = self.rng
        generation = max(1, self.mark.generation + rng.choice([0, 0, 0, 0, 1, -1, 2]))
        first = max(1, self.mark.sequence + 1 + rng.choice([0, 0, 0, 0, -2, -1, 1, 2]))
        count = rng.choice([1, 1, 1, 3])
        self.number += 1
        texts = [f"{self.number}.{n}" for n in range(count)]
        held = (self.writer.lease.id, self.writer.lease.generation)
        if held != (self.taken.id, generation) or rng.random() < 0.3:
            self.writer = self.stasher.leased(Lease(self.taken.id, generation, first - 1))
        self.writer.seek(first - 1)
        step = judge(self.mark, generation, first, first + count - 1, expired=self.expired)
        records = [record(text) for text in texts]
        if (error := ERRORS.get(step.verdict)) is not None:
            with pytest.raises(error) as refused:
                self.stash(records)
            assert type(refused.value) is error
        else:
            found = self.stash(records)
            assert [each.repeated for each in found] == [n < step.repeats for n in range(count)]
            self.log += texts[step.repeats :]
            self.mark = step.mark

    def stash(self, records: list[Any]) -> list[Any]:
        if len(records) == 1 and self.rng.random() < 0.7:
            return [self.writer.stash(self.connection, records[0], position=str(self.number))]
        return self.writer.stash_many(self.connection, records, position=str(self.number))

    def transaction(self) -> None:
        """Several steps, committed or not, with a savepoint that is kept or not."""
        with self.connection.transaction() as outer:
            before = (self.mark, list(self.log))
            for _ in range(self.rng.randrange(4)):
                self.bring()
            with self.connection.transaction() as inner:
                kept = (self.mark, list(self.log))
                self.bring()
                if self.rng.random() < 0.5:
                    self.mark, self.log = kept
                    raise psycopg.Rollback(inner)
            self.bring()
            if self.rng.random() < 0.3:
                self.mark, self.log = before
                raise psycopg.Rollback(outer)

    def take(self) -> None:
        old, self.taken = self.taken, self.stasher.lease(self.connection, "reader")
        self.mark = lease(self.mark)
        assert HighWaterMark(self.taken.generation, self.taken.sequence) == self.mark
        assert self.taken.id == old.id
        self.expired = False

    def expire(self) -> None:
        end(self.dsn, "reader")
        self.expired = True


@pytest.mark.parametrize("seed", range(6))
def test_the_database_decides_as_the_machine_does(database: str, seed: int) -> None:
    rng = random.Random(seed)
    with psycopg.connect(database, autocommit=True) as connection:
        model = Model(database, connection, rng)
        for _ in range(120):
            rng.choices([model.bring, model.transaction, model.take, model.expire], [12, 6, 2, 0.5])[0]()
            if model.expired and rng.random() < 0.5:
                model.take()
    assert values(database) == model.log
    assert len(model.log) > 50, "it did something"
