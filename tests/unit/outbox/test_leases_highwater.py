"""The high-water mark against an oracle that keeps every number it was ever brought, and compares nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from harvester.outbox.leases import HighWaterMark, RunVerdict, judge, lease
from tests.support.longs import some_of


@dataclass
class Producer:
    """The oracle's memory of one: the numbers it has, in the order in which they were written, and by whom."""

    generation: int = 1
    expired: bool = False
    written: list[int] = field(default_factory=list)

    def bring(self, generation: int, numbers: list[int]) -> tuple[RunVerdict, int]:
        """The verdict, and how many of the numbers were known."""
        if self.expired:
            return RunVerdict.EXPIRED, 0
        if generation != self.generation and generation != self.generation + 1:
            return (RunVerdict.FENCED if generation < self.generation else RunVerdict.UNKNOWN), 0
        known = [number for number in numbers if number in self.written]
        missing = [number for number in range(1, numbers[0]) if number not in self.written]
        if missing:
            return RunVerdict.GAP, 0
        self.generation = generation
        self.written += [number for number in numbers if number not in known]
        return (RunVerdict.REPEATED if len(known) == len(numbers) else RunVerdict.ACCEPTED), len(known)


class HighWaterMachine(RuleBasedStateMachine):
    """One name over its life: leases, records in, below and above their order, generations, expiry."""

    def __init__(self) -> None:
        super().__init__()
        self.mark: HighWaterMark = lease(None)
        self.oracle = Producer()

    @rule(generation=st.integers(-2, 3), start=st.integers(-4, 3), count=st.integers(1, 5))
    def bring(self, generation: int, start: int, count: int) -> None:
        number, first = self.oracle.generation + generation, max(1, len(self.oracle.written) + 1 + start)
        step = judge(self.mark, number, first, first + count - 1, expired=self.oracle.expired)
        verdict, known = self.oracle.bring(number, list(range(first, first + count)))
        assert (step.verdict, step.repeats) == (verdict, known)
        self.mark = step.mark

    @rule(count=st.integers(1, 4))
    def in_order(self, count: int) -> None:
        """So that runs get long."""
        first = len(self.oracle.written) + 1
        self.bring(0, 0, count)
        assert self.oracle.expired or self.mark.sequence == first + count - 1

    @rule(failing=st.integers(1, 3), behind=st.integers(1, 4))
    def pipelined(self, failing: int, behind: int) -> None:
        """Records that are on their way while those before them never arrive: not one of them gets through."""
        before, top = self.mark, len(self.oracle.written)
        for number in range(top + 1 + failing, top + 1 + failing + behind):
            step = judge(self.mark, self.mark.generation, number, number, expired=self.oracle.expired)
            assert step.verdict is (RunVerdict.EXPIRED if self.oracle.expired else RunVerdict.GAP)
            self.mark = step.mark
        assert self.mark == before

    @rule()
    def take(self) -> None:
        """The next lease of the name goes on with the log, whether or not the one before has expired."""
        self.mark = lease(self.mark)
        self.oracle.expired = False
        self.oracle.generation += 1

    @rule()
    def expire(self) -> None:
        self.oracle.expired = True

    @invariant()
    def one_number_tells_it_all(self) -> None:
        assert self.oracle.written == list(range(1, len(self.oracle.written) + 1)), "each once, in order, without holes"
        assert self.mark == HighWaterMark(self.oracle.generation, len(self.oracle.written))


TestHighWater = HighWaterMachine.TestCase
TestHighWater.settings = settings(max_examples=some_of(200), stateful_step_count=40, deadline=None)


@given(st.lists(st.integers(1, 12), max_size=60))
def test_whatever_comes_in_whatever_order_each_is_written_once(numbers: list[int]) -> None:
    """A retry with every record sent again until all are there; the log is the numbers in order."""
    mark, log = HighWaterMark(), list[int]()
    for number in [*numbers, *range(1, 13)]:
        step = judge(mark, 1, number, number)
        mark = step.mark
        if step.verdict is RunVerdict.ACCEPTED:
            log.append(number)
    assert log == list(range(1, 13))


def test_nothing_is_known_of_a_producer_that_is_not_there() -> None:
    assert judge(None, 3, 1, 1).verdict is RunVerdict.EXPIRED


@pytest.mark.parametrize(("first", "last"), [(0, 1), (-1, -1), (2, 1)])
def test_a_run_has_numbers(first: int, last: int) -> None:
    with pytest.raises(ValueError, match="not a run"):
        judge(HighWaterMark(), 1, first, last)
