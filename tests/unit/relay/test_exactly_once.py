"""Transactions: their records, the numbers of these, and the turns of two lanes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock
from uuid import UUID

import pytest
from confluent_kafka import KafkaError, KafkaException

from harvester import origin
from harvester.delivery.decode import Broken
from harvester.delivery.lane import NOT_ALLOWED, Lane, TransactionOutcome
from harvester.delivery.progress import EncodedProgress, Progress, decode
from harvester.delivery.retries import Policy
from harvester.origin import Stamps
from harvester.outbox.purge_session import PoisonRow
from harvester.record import KafkaRecord
from harvester.relay import exactly_once
from harvester.relay.at_least_once import RESERVED
from harvester.relay.core.frames import Frame, Parked, Remark, Remarked, Trouble
from harvester.relay.core.transaction_queue import QueuedRecord, TransactionQueue
from harvester.relay.exactly_once import TransactionWriter, Transactor
from harvester.relay.transaction_intake import TransactionIntake
from tests.support.relay_shard import Delivered

INCARNATION = str(UUID(int=5))


class Producing:
    """A lane that takes everything, and what it took."""

    def __init__(self) -> None:
        self.taken: list[tuple[int, int]] = []  # id, number
        self.reported: list[Callable[..., None]] = []
        self.then: Callable[[], None] = lambda: None

    def produce(self, _topic: str, _value: Any, _key: Any, _partition: int, on_delivery: Any, *rest: Any) -> None:
        found = origin.decode(rest[-1][-1][1])
        assert found is not None
        self.taken.append((found.id, found.sequence))
        self.reported.append(on_delivery)
        self.then()

    def poll(self, _timeout_s: float) -> TransactionOutcome:
        return TransactionOutcome.DONE


class Shard:
    def __init__(self) -> None:
        self.batches, self.changed, self.over = TransactionQueue(100, 100), threading.Condition(), False
        self.low_water = None
        intake: Any = self
        self.filler = TransactionWriter(intake, Stamps("harvester", 0), frozenset({"own"}))
        self.filler.begin(1, INCARNATION)
        self.lane: Any = Producing()

    def is_over(self) -> bool:
        return self.over

    def has_more(self) -> bool:
        return self.over or self.batches.is_ready

    def add(self, *ids: int, topic: str = "t") -> None:
        with self.changed:
            for number in ids:
                self.batches.offer(QueuedRecord(number, None, KafkaRecord(number, None, topic, b"", [], -1, 0), 0.0))
            self.changed.notify()


@pytest.fixture
def shard() -> Shard:
    return Shard()


def test_what_comes_while_partitions_are_registered_is_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exactly_once, "_LONGEST_S", 120.0)
    shard, handed_over = Shard(), threading.Event()

    def come_later() -> None:
        handed_over.wait()
        shard.lane.then = end
        shard.add(2)

    def end() -> None:
        shard.over = True  # so that nothing else is waited for

    shard.lane.then = handed_over.set
    shard.add(1)
    late = threading.Thread(target=come_later)
    late.start()
    assert shard.filler.fill(shard.lane, 60.0)
    late.join()
    assert shard.lane.taken == [(1, 1), (2, 2)]


def test_numbers_of_a_transaction_that_is_not_committed_are_used_again(shard: Shard) -> None:
    shard.add(1, 2)
    assert shard.filler.fill(shard.lane, 0.0)
    shard.batches.aborted()
    assert shard.filler.fill(shard.lane, 0.0)
    shard.filler.committed()
    shard.batches.committed(0)
    shard.add(3)
    assert shard.filler.fill(shard.lane, 0.0)
    assert shard.lane.taken == [(1, 1), (2, 2), (1, 1), (2, 2), (3, 3)]
    shard.filler.begin(2, INCARNATION)
    shard.batches.aborted()
    assert shard.filler.fill(shard.lane, 0.0)
    assert shard.lane.taken[-1] == (3, 1)


def test_a_transaction_that_nobody_wants_takes_nothing(shard: Shard) -> None:
    shard.add(1)
    shard.over = True
    assert shard.filler.fill(shard.lane, 0.0)
    assert shard.lane.taken == []
    assert shard.batches.queued == 1


def test_a_record_that_cannot_be_sent_ends_it(shard: Shard) -> None:
    shard.batches.offer(QueuedRecord(1, None, Broken(1, None, "no headers"), 0.0))
    assert not shard.filler.fill(shard.lane, 0.0)
    shard.batches.aborted()
    assert [(entry.id, why) for entry, why in shard.filler.failed] == [(1, "no headers")]
    shard.batches.drop_queue()
    shard.add(2, topic="own")
    assert not shard.filler.fill(shard.lane, 0.0)
    assert [(entry.id, why) for entry, why in shard.filler.failed] == [(2, RESERVED)]


def test_what_failed_only_because_the_transaction_did_is_not_at_fault(shard: Shard) -> None:
    shard.add(1, 2)
    assert shard.filler.fill(shard.lane, 0.0)
    first, second = shard.lane.reported
    first(KafkaError(KafkaError._PURGE_QUEUE), None)
    second(KafkaError(KafkaError.MSG_SIZE_TOO_LARGE), None)
    assert [entry.id for entry, _ in shard.filler.failed] == [2]
    shard.batches.aborted()
    assert shard.filler.fill(shard.lane, 0.0)
    assert shard.filler.failed == []


def test_whatever_produce_raises_breaks_that_record_only(shard: Shard) -> None:
    """P33."""

    def overflow() -> None:
        if shard.lane.taken[-1][0] == 2:
            raise OverflowError("too large")

    shard.lane.then = overflow
    shard.add(1, 2, 3)
    assert not shard.filler.fill(shard.lane, 0.0)
    assert [(entry.id, why) for entry, why in shard.filler.failed] == [(2, "the client refused it: too large")]


def test_a_delivery_without_an_offset_is_none(shard: Shard) -> None:
    """P45."""
    shard.add(1, 2)
    assert shard.filler.fill(shard.lane, 0.0)
    for report, offset in zip(shard.lane.reported, (0, None), strict=True):
        report(None, Delivered(offset))
    assert [entry.id for entry, _ in shard.filler.failed] == [2]


# -- turns


class Scripted:
    """A lane that does as it is told, and notes what it was asked for."""

    def __init__(self, number: int, calls: list[str]) -> None:
        self.number, self.calls = number, calls
        self.begun = self.noted = False
        self.refused: KafkaError | None = None
        self.not_added: dict[str, str] = {}
        self.outcomes: dict[str, list[TransactionOutcome]] = {}
        self.error = ""
        self.room, self.answer_s = 100, 60.0
        self.sent: Callable[[], None] = lambda: None  # when all of the transaction was handed over
        self.ahead: list[Progress] = []
        self.concluded: list[Progress] = []
        self.queued: Callable[[], None] = lambda: None  # while the transaction is committed
        self.reported: Callable[[], None] = lambda: None  # while it is aborted

    def _done(self, what: str) -> TransactionOutcome:
        self.calls.append(f"{what} {self.number}")
        later = self.outcomes.get(what)
        return later.pop(0) if later else TransactionOutcome.DONE

    def begin(self) -> TransactionOutcome:
        outcome = self._done("begin")
        self.begun, self.noted = outcome is TransactionOutcome.DONE, False
        return outcome

    def note(self, progress: EncodedProgress) -> TransactionOutcome:
        self.ahead.append(decode(*progress))
        outcome = self._done("note")
        self.noted = outcome is TransactionOutcome.DONE
        return outcome

    def produce(self, *_: Any) -> None:
        self.calls.append(f"produce {self.number}")

    def flush(self, _timeout_s: float) -> bool:
        self.sent()
        return True

    def conclude(self, progress: EncodedProgress) -> TransactionOutcome:
        self.concluded.append(decode(*progress))
        return self._done("conclude")

    def commit_concluded(self) -> TransactionOutcome:
        self.queued()
        outcome = self._done("commit")
        self.begun = False
        return outcome

    def abort(self) -> TransactionOutcome:
        self.begun = False
        self.reported()
        return self._done("abort")

    def poll(self, _timeout_s: float) -> TransactionOutcome:
        return TransactionOutcome.DONE

    def close(self) -> None:
        self.calls.append(f"close {self.number}")


class Turns:
    """A transactor with two open lanes; its thread is not started."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.said: list[Frame] = []
        self.pauses: list[float] = []
        self.quarantined: list[PoisonRow] = []
        shard: Any = SimpleNamespace(
            index=0, failpoints=SimpleNamespace(hit=lambda *_, **__: None), trusted=lambda: True,
            send=self.said.append, purge=lambda _ids: None, quarantine=self.quarantined.append,
        )  # fmt: skip
        self.intake = TransactionIntake(100, Policy(2, 0.1, 10.0, 30.0, "quarantine"), shard)
        self.intake.batches.most_named = 100
        lanes: Any = SimpleNamespace(explain=lambda _lane: "the progress is refused")
        purger: Any = SimpleNamespace(term=None, progress_topic=None, delete=None, delete_same=None)
        self.transactor = Transactor(self.intake, lanes, shard, purger, "harvester", frozenset({"own"}))
        self.lanes = [Scripted(number, self.calls) for number in (0, 1)]
        first, second = cast("list[Lane]", self.lanes)
        self.intake.under = Remark(1, 7, "holder", incarnation=INCARNATION)
        self.intake.lane, self.transactor._idle = first, second
        self.transactor._term = 7
        self.transactor._writer.begin(7, INCARNATION)

    def add(self, number: int, row_sum: int = 0, topic: str = "t") -> None:
        record = KafkaRecord(number, None, topic, b"", [], -1, 0)
        assert self.intake.batches.offer(QueuedRecord(number, None, record, 0.0, row_sum=row_sum))

    def turn(self) -> list[str]:
        """One transaction; what was asked of the lanes."""
        self.calls.clear()
        assert self.intake.lane is not None
        self.transactor._transact(self.intake.lane, 0.0)
        return self.calls


def test_the_next_transaction_begins_while_the_progress_of_this_one_is_on_its_way() -> None:
    """Its own progress record goes ahead, but not before the commit under way is clear: no row waits for that work."""
    turns = Turns()
    turns.add(1)
    assert turns.turn() == ["begin 0", "note 0", "produce 0", "conclude 0", "begin 1", "commit 0", "note 1"]
    turns.add(2)
    assert turns.turn() == ["produce 1", "conclude 1", "begin 0", "commit 1", "note 0"]


def test_progress_names_each_row_with_its_sum() -> None:
    """P49."""
    turns = Turns()
    first, second = turns.lanes
    turns.add(5, 55)
    turns.add(3, 33)
    turns.turn()
    turns.add(4, 44)
    turns.turn()
    turns.add(6, 66)
    turns.turn()
    (before, last), (between,) = first.concluded, second.concluded
    assert (before.ids, before.sums) == ((3, 5), (33, 55))
    assert (between.ids, between.sums) == ((3, 4, 5), (33, 44, 55)), "nothing is purged"
    assert (last.ids, last.sums) == ((3, 4, 5, 6), (33, 44, 55, 66))
    assert [one.ids for one in first.ahead] == [(), (3, 5)], "what this lane has committed"


def test_what_is_queued_does_not_wait_for_the_record_that_goes_ahead() -> None:
    """One request to the coordinator names all partitions then."""
    turns = Turns()
    turns.add(1)
    turns.lanes[0].queued = lambda: turns.add(2)
    assert turns.turn()[-1] == "commit 0"
    assert turns.turn()[:2] == ["note 1", "produce 1"]


def test_a_lane_that_cannot_begin_ahead_is_asked_again_when_its_turn_has_come() -> None:
    turns = Turns()
    turns.lanes[1].outcomes["begin"] = [TransactionOutcome.UNCLEAR]
    turns.add(1)
    assert turns.turn()[-3:] == ["commit 0", "begin 1", "note 1"]


def test_after_a_commit_that_is_refused_the_same_lane_goes_on() -> None:
    """The transaction that the other lane has begun stays open, and has no record."""
    turns = Turns()
    turns.lanes[0].outcomes["commit"] = [TransactionOutcome.REFUSED]
    turns.add(1)
    assert turns.turn()[-3:] == ["begin 1", "commit 0", "abort 0"]
    assert turns.turn() == ["begin 0", "note 0", "produce 0", "conclude 0", "commit 0", "note 1"]


def test_an_unclear_commit_closes_both_lanes() -> None:
    turns = Turns()
    turns.lanes[0].outcomes["commit"] = [TransactionOutcome.UNCLEAR]
    turns.add(1)
    assert turns.turn()[-2:] == ["close 0", "close 1"]
    assert turns.intake.lane is None


def test_a_lane_that_cannot_be_opened_is_told_with_the_topics_that_did_not_answer() -> None:
    """Kafka cannot end a transaction that has a partition with too few replicas, and names none."""
    turns = Turns()
    for number, topic in enumerate(("b", "a", "b")):
        turns.add(number, topic=topic)

    def time_out() -> None:
        with turns.intake.changed:
            taken = turns.intake.batches.taken
        turns.transactor._writer.failed = [(entry, KafkaError(KafkaError._MSG_TIMED_OUT)) for entry in taken]

    turns.lanes[0].sent = time_out
    assert turns.turn()[-2:] == ["close 0", "close 1"]
    turns.transactor.trouble("lane 0 cannot be opened")
    assert turns.said[-1] == Trouble("lane 0 cannot be opened; records of a, b were not acknowledged in time")
    turns.transactor._answer(Remark(2, None, None))
    turns.transactor.trouble("lane 0 cannot be opened")
    assert turns.said[-1] == Trouble("lane 0 cannot be opened")


@pytest.mark.parametrize("outcome", [TransactionOutcome.UNCLEAR, TransactionOutcome.DONE])
def test_what_may_be_committed_when_the_shard_is_drained_is_in_doubt(outcome: TransactionOutcome) -> None:
    """Only who opens the lanes finds out, and whoever the outbox is moved to does not open them."""
    turns = Turns()
    turns.add(1)
    turns.lanes[0].outcomes["commit"] = [outcome]
    turns.turn()
    turns.intake.pending = drain = Remark(2, None, None)
    turns.transactor._answer(drain)
    is_clear = outcome is TransactionOutcome.DONE
    assert turns.said[-1] == Remarked(2, [1] if is_clear else [], in_doubt=not is_clear)


def test_what_ends_a_transaction_and_is_no_record_is_told_and_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the record that goes ahead is refused while records are handed over."""
    turns = refused(monkeypatch)
    for _ in range(3):
        assert turns.turn()[-1] == "abort 0"
    assert turns.lanes[0].error
    assert turns.said == [Trouble("nothing can be committed: the progress is refused")]
    assert turns.pauses == [0.5]
    turns.transactor._answer(Remark(2, None, None))  # another leadership begins without that
    assert turns.said[1] == Trouble(None)
    assert turns.transactor._refused == 0


def test_a_record_whose_failure_shows_only_in_the_end_is_dealt_with_and_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A broker refuses it while others are handed over: the client refuses these, and reports that one later."""
    turns = refused(monkeypatch)
    turns.transactor._refused = 2
    entry = turns.intake.batches.take(1)[0]
    turns.intake.batches.aborted()
    too_large = (entry, KafkaError(KafkaError.MSG_SIZE_TOO_LARGE))
    turns.lanes[0].reported = lambda: turns.transactor._writer.failed.append(too_large)
    turns.turn()
    assert (turns.said, turns.pauses, turns.transactor._refused) == ([], [], 2)
    assert [poison.id for poison in turns.quarantined] == [1]


@pytest.mark.parametrize("outcome", [TransactionOutcome.DONE, TransactionOutcome.UNCLEAR])
def test_records_for_topics_that_may_not_be_written_are_at_fault_and_no_others(
    monkeypatch: pytest.MonkeyPatch, outcome: TransactionOutcome
) -> None:
    """Because of them the coordinator refuses the whole transaction, and the client names none of them."""
    turns = refused(monkeypatch)
    turns.transactor._refused = 2
    turns.add(2, topic="denied")
    turns.intake.batches.take(2)
    turns.lanes[0].outcomes["abort"] = [outcome]
    turns.lanes[0].not_added = {"t": "Broker: Coordinator not available", "denied": NOT_ALLOWED.str()}
    assert turns.transactor._abort(cast("Lane", turns.lanes[0]))
    if outcome is TransactionOutcome.UNCLEAR:
        turns.transactor._published(1, [])  # both lanes are open again
    (parked,) = [frame for frame in turns.said if isinstance(frame, Parked)]
    assert (parked.record_id, parked.held) == (2, False)
    assert parked.error == "TOPIC_AUTHORIZATION_FAILED: Broker: Topic authorization failed"
    assert turns.pauses == []
    turns.lanes[0].outcomes["abort"] = []
    turns.add(2, topic="denied")
    turns.intake.batches.take(2)
    assert turns.transactor._abort(cast("Lane", turns.lanes[0]))
    assert [poison.id for poison in turns.quarantined] == [2]


@pytest.mark.parametrize("code", [KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_PARTITION])
def test_lanes_of_a_topic_that_is_gone_are_opened_again(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """Opening looks whether it is still the same (P22); in another one nothing is sent."""
    turns = refused(monkeypatch)
    turns.lanes[0].refused = KafkaError(code)
    assert turns.turn()[-3:] == ["abort 0", "close 0", "close 1"]
    assert (turns.said, turns.pauses) == ([], [])


def test_a_lane_that_is_of_no_use_any_more_is_opened_again_without_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = refused(monkeypatch)
    turns.transactor._refused = 2
    turns.lanes[0].outcomes["abort"] = [TransactionOutcome.UNCLEAR]
    assert turns.turn()[-2:] == ["close 0", "close 1"]
    assert (turns.said, turns.pauses) == ([], [])


def refused(monkeypatch: pytest.MonkeyPatch) -> Turns:
    """A record is queued, and the first lane's client takes none."""
    turns = Turns()
    error = KafkaException(KafkaError(KafkaError._STATE))
    monkeypatch.setattr(turns.lanes[0], "produce", Mock(side_effect=error))
    monkeypatch.setattr(turns.intake.changed, "wait_for", lambda _until, timeout=None: turns.pauses.append(timeout))
    turns.add(1)
    return turns
