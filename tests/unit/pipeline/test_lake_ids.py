"""Which ids of a batch are new, against a plain set of all that ever came."""

from __future__ import annotations

from collections import Counter
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harvester.errors import CorruptSeenIds
from harvester.pipeline.lake.ids import BatchIds, StoredIds, Word

A, B = UUID(int=7), UUID(int=8)
SMALLEST, LARGEST = -(2**63), 2**63 - 1

near = st.integers(-130, 130)
ids = near | st.integers(SMALLEST, LARGEST) | st.sampled_from([SMALLEST, SMALLEST + 1, LARGEST, LARGEST - 1])
records = st.lists(st.tuples(st.sampled_from([A, B]), ids), max_size=60)


def counted(batch: list[tuple[UUID, int]]) -> BatchIds:
    """As Spark counts them, in two parts: records of one word may be of several topics."""
    found = BatchIds()
    for part in (batch[::2], batch[1::2]):
        words: dict[tuple[UUID, int], Word] = {}
        for incarnation, number in part:
            bit = 1 << (number & 63)
            one = Word(number >> 6, bit, bit, 1)
            name = incarnation, one.at
            words[name] = words[name] + one if name in words else one
        for (incarnation, _), word in words.items():
            found.add(incarnation, [word])
    return found


def ids_of(incarnation: UUID, at: int, bits: int) -> set[tuple[UUID, int]]:
    return {(incarnation, at * 64 + bit) for bit in range(64) if bits >> bit & 1}


@given(batches=st.lists(records, max_size=6), most=st.sampled_from([1, 2, 5, 1000]))
def test_every_repeat_is_a_suspect_and_what_is_known_is_stored(
    batches: list[list[tuple[UUID, int]]], most: int
) -> None:
    stored, model = StoredIds(), set[tuple[UUID, int]]()
    for batch in batches:
        ids, known, asked = counted(batch), set[tuple[UUID, int]](), set[tuple[UUID, int]]()
        suspects = set[tuple[UUID, int]]()
        for one in ids.suspects(stored):
            suspects |= ids_of(one.incarnation, one.at, one.ids)
            known |= ids_of(one.incarnation, one.at, one.known)
            asked |= ids_of(one.incarnation, one.at, one.asked)
        times = Counter(batch)
        old = set(batch) & model
        assert known <= old
        assert old <= known | asked, "a repeat of an earlier batch passes for new"
        assert not known & asked
        assert {name for name, count in times.items() if count > 1} | old <= suspects <= set(batch)
        if most == 1000:
            assert not asked, "nothing was dropped, so nobody has to be asked"
            assert known == old
            if max(times.values(), default=0) <= 2:
                assert suspects == old | {name for name, count in times.items() if count > 1}
        stored.add(ids, most)
        model |= set(batch)
        assert len(stored.seen) <= most + 2, "more than may be left: what begins at the smallest id stays"
        assert StoredIds.from_text(stored.to_text()) == stored


def test_dense_ids_are_one_interval_however_many_there_are() -> None:
    stored = StoredIds()
    for batch in range(100):
        full = BatchIds()
        full.add(A, [Word(at, 2**64 - 1, 2**64 - 1, 64) for at in range(batch * 1000, batch * 1000 + 1000)])
        assert not full.suspects(stored)
        stored.add(full)
    assert list(stored.seen.intervals(A)) == [(0, 100 * 64_000 - 1)]
    assert not stored.floors


def test_below_a_floor_the_table_is_asked_and_above_it_nobody() -> None:
    stored = StoredIds(floors={A: 100})
    [suspect] = counted([(A, 99), (A, 101), (B, 99)]).suspects(stored)
    assert ids_of(A, suspect.at, suspect.asked) == {(A, 99)}
    assert suspect.known == 0
    assert not counted([(A, 300), (A, 301)]).suspects(stored)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 2}', StoredIds(floors={A: 1}).to_text()[:-8]])
def test_what_cannot_be_read_is_told(text: str) -> None:
    with pytest.raises(CorruptSeenIds):
        StoredIds.from_text(text)
