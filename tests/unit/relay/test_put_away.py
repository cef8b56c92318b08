"""What a shard does with a record whose value has to be put away first."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harvester import StoreSettings
from harvester.claim_check.reference import refer
from harvester.delivery.decode import Oversize
from harvester.delivery.retries import Policy
from harvester.failpoints import load
from harvester.record import KafkaRecord
from harvester.relay.at_least_once import Sender
from harvester.relay.core import frames as f
from harvester.relay.core.transaction_queue import QueuedRecord, TransactionQueue
from harvester.relay.put_away import Outcome, PutAway, PutAwaySettings
from harvester.relay.transaction_intake import TransactionIntake
from tests.support.rows import row

POLICY = Policy(1, retry_backoff_s=1.0, retry_backoff_max_s=4.0, queue_timeout_s=30.0)
LEADING = f.Remark(1, 7, "holder", "server", "00000000-0000-0000-0000-000000000005")
LARGE = b"x" * 100


class Host:
    """A shard around its records, and a store that answers when the test says so."""

    index, is_crowded, stored = 0, False, 0

    def __init__(self) -> None:
        self.said: list[f.Frame] = []
        self.send, self.failpoints = self.said.append, load()
        self.fatal: list[str] = []
        self.die = self.fatal.append
        self.produced: list[bytes | None] = []
        self.waiting: list[tuple[Oversize, Callable[[Outcome], None]]] = []
        shard: Any = self
        self.decode = PutAway(PutAwaySettings(StoreSettings("file:///nowhere"), 50), shard).decode

    def trusted(self) -> bool:
        return True

    def wake(self) -> None:
        """A retry was scheduled."""

    def purge(self, ids: Any) -> None:
        """The test says when it has committed."""

    quarantine = purge

    def produce(self, _topic: str, value: bytes | None, *_: Any) -> None:
        self.produced.append(value)

    def put(self, record: Oversize, done: Callable[[Outcome], None]) -> None:
        self.waiting.append((record, done))

    def parked(self) -> list[f.Parked]:
        return [frame for frame in self.said if isinstance(frame, f.Parked)]


@pytest.fixture
def host() -> Any:
    return Host()


def dispatch(*rows: tuple[int, bytes | None, bytes], epoch: int = 1) -> f.Dispatch:
    return f.Dispatch(epoch, b"".join(row(record_id=i, key=key, topic=b"t", value=value) for i, key, value in rows))


@pytest.fixture
def sender(host: Any) -> Sender:
    made = Sender(host, POLICY, host, put_away=host)
    made.remark(LEADING)
    host.said.clear()
    return made


@pytest.fixture
def intake(host: Any) -> TransactionIntake:
    made = TransactionIntake(100, POLICY, host, host)
    made.under, made.batches.most_named = LEADING, 100
    return made


def test_at_least_once_its_key_waits_for_the_store_and_no_other(host: Any, sender: Sender) -> None:
    sender.dispatch(dispatch((1, b"a", LARGE), (2, b"a", b"2"), (3, b"b", b"3")))
    assert host.produced == [b"3"]
    ((oversize, done),) = host.waiting
    done(oversize.record._replace(value=b"a reference"))
    assert host.produced == [b"3", b"a reference"]
    sender.purged([1])
    assert host.produced == [b"3", b"a reference", b"2"]


def test_at_least_once_a_store_that_fails_parks_the_record_and_burns_no_attempt(host: Any, sender: Sender) -> None:
    """Though the policy allows one attempt only."""
    for epoch in (1, 1, 1):
        sender.dispatch(dispatch((1, b"a", LARGE), (2, b"a", b"2"), epoch=epoch))
        host.waiting.pop()[1]("the store is away")
        sender.closed(1, 1)
    assert [(frame.record_id, frame.given_back, frame.error, frame.attempts) for frame in host.parked()] == [
        (1, [2], "the store is away", 0)
    ] * 3
    assert (host.produced, sender.unsettled) == ([], 0)
    assert not [frame for frame in host.said if isinstance(frame, f.InDoubt)]  # nothing was sent


@pytest.mark.parametrize("again", [False, True])
def test_at_least_once_what_a_remark_dropped_is_not_sent_when_its_value_arrives(
    host: Any, sender: Sender, again: bool
) -> None:
    sender.dispatch(dispatch((1, b"a", LARGE)))
    ((oversize, first),) = host.waiting
    sender.remark(f.Remark(2, 8, "holder", "server", LEADING.incarnation))
    if again:
        sender.dispatch(dispatch((1, b"a", LARGE), epoch=2))
    first(oversize.record._replace(value=b"of the first"))
    assert host.produced == []
    if again:
        host.waiting[1][1](oversize.record._replace(value=b"of the second"))
        assert host.produced == [b"of the second"]


def taken(intake: TransactionIntake) -> list[int]:
    with intake.changed:
        return [entry.id for entry in intake.batches.take(100)]


def test_exactly_once_its_key_waits_for_the_store_and_no_other(host: Any, intake: TransactionIntake) -> None:
    intake.dispatch(dispatch((1, b"a", b"1"), (2, b"a", LARGE), (3, b"a", b"3"), (4, b"b", b"4"), (5, None, LARGE)))
    intake.dispatch(dispatch((6, b"a", LARGE), (7, b"a", b"7")))
    assert intake.batches.queued == 7
    assert taken(intake) == [1, 4]
    assert [oversize.id for oversize, _ in host.waiting] == [2, 5]  # one of a key at a time
    for oversize, done in tuple(host.waiting):
        done(oversize.record._replace(value=b"a reference"))
    assert taken(intake) == [2, 3, 5]
    host.waiting[2][1](host.waiting[2][0].record)
    assert taken(intake) == [6, 7]


def test_exactly_once_it_joins_behind_older_records_of_its_key(host: Any, intake: TransactionIntake) -> None:
    intake.dispatch(dispatch((1, b"a", b"1"), (2, b"a", LARGE)))
    host.waiting[0][1](host.waiting[0][0].record)
    assert taken(intake) == [1, 2]


def test_exactly_once_a_store_that_fails_parks_its_key_and_burns_no_attempt(
    host: Any, intake: TransactionIntake
) -> None:
    for _ in range(3):
        intake.dispatch(dispatch((2, b"a", LARGE), (3, b"a", b"3"), (5, None, LARGE)))
        for _, done in (host.waiting.pop(), host.waiting.pop()):
            done("the store is away")
        intake.closed(1, 2)
    found = [(frame.record_id, frame.given_back, frame.attempts) for frame in host.parked()]
    assert found == [(5, [], 0), (2, [3], 0)] * 3
    assert (intake.batches.queued, taken(intake)) == (0, [])


def test_exactly_once_what_was_dropped_is_not_queued_when_its_value_arrives(
    host: Any, intake: TransactionIntake
) -> None:
    intake.dispatch(dispatch((1, b"a", LARGE), (2, b"a", b"2")))
    ((oversize, done),) = host.waiting
    intake.remark(LEADING)
    intake.pending = None
    done(oversize.record)
    assert taken(intake) == []
    intake.dispatch(dispatch((1, b"a", b"1"), (2, b"a", b"2")))
    assert taken(intake) == [1, 2]  # nothing is held any more


def test_exactly_once_what_a_quarantine_held_is_put_away_after_it(host: Any, intake: TransactionIntake) -> None:
    intake.dispatch(dispatch((1, b"a", b"1"), (2, b"a", LARGE)))
    (poison,) = intake.batches._queue
    with intake.changed:
        intake.refusals.poison(poison, "refused", LEADING)
    ((oversize, done),) = host.waiting
    done(oversize.record)
    assert taken(intake) == []
    intake.purged([1])
    host.waiting[1][1](oversize.record)
    assert taken(intake) == [2]


def test_what_is_behind_a_quarantine_is_put_away_when_that_has_committed() -> None:
    queue = TransactionQueue(100, 100)
    large = KafkaRecord(2, b"a", "t", LARGE, [], -1, 0)
    poison = QueuedRecord(1, b"a", KafkaRecord(1, b"a", "t", b"1", [], -1, 0), 0.0)
    entry = QueuedRecord(2, b"a", Oversize(2, b"a", large), 0.0)
    queue.offer(poison)
    queue.offer_oversize(entry)
    assert queue.to_store() == [entry]
    queue.remove(poison)  # and what waits for the store is behind it from now on
    assert not queue.is_oversize(entry)
    queue.settle([1])
    assert queue.to_store() == [entry]
    queue.stored(entry, large, 5.0)
    assert queue.take(9) == [entry]
    assert entry.since == 5.0  # the time in which the store had it is not one without progress


def test_values_are_put_away_by_a_thread_that_outlives_whatever_one_of_them_raises(
    host: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_away = PutAway(PutAwaySettings(StoreSettings(f"file://{tmp_path}"), 50), host)
    record = KafkaRecord(1, b"a", "t", LARGE, [], -1, 0)
    outcomes, heard = list[Outcome](), threading.Event()

    def done(outcome: Outcome) -> None:
        outcomes.append(outcome)
        heard.set()

    def put() -> None:
        heard.clear()
        put_away.put(Oversize(1, b"a", record), done)
        assert heard.wait(30)

    with monkeypatch.context() as inner:
        inner.setattr("harvester.relay.put_away.refer", lambda _record: 1 / 0)
        put()
    put()
    failed, stored = outcomes
    assert isinstance(failed, str)
    assert "ZeroDivisionError" in failed
    assert isinstance(stored, KafkaRecord)
    assert (tmp_path / refer(record).name).read_bytes() == LARGE
    assert (put_away.stored, host.fatal) == (1, [])
