"""Holes in sequences, and what explains them."""

from __future__ import annotations

from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harvester.origin import Origin
from harvester.verify.sequences import Hole, Sequenced, Sequences, Stream
from harvester.verify.verdict import MAX_FINDINGS

A, B = UUID(int=1), UUID(int=2)


def origin(
    number: int, record_id: int, *, term: int = 1, lane: int = 0, producer: int = 1, incarnation: UUID = A
) -> Origin:
    return Origin(incarnation, record_id, term, lane, producer, number, 0)


def judged(*origins: Origin, **known: object) -> Sequenced:
    sequences = Sequences()
    for at_ms, one in enumerate(origins):
        sequences.add(one, at_ms)
    return sequences.judge(**known)  # type: ignore[arg-type]


def holes(verdict: Sequenced) -> dict[str, int]:
    return {hole.name: count for hole, count in verdict.holes.items() if count}


def test_dense_sequences_hold() -> None:
    verdict = judged(*[origin(number, 100 - number, lane=lane) for number in range(1, 9) for lane in (0, 1)])
    assert verdict.holds
    assert (verdict.streams, verdict.records, verdict.repeats, verdict.clashes) == (2, 16, 8, 0)
    assert judged().holds


def test_a_hole_in_the_last_stream_is_open() -> None:
    verdict = judged(origin(2, 2), origin(5, 5), origin(3, 3))
    assert holes(verdict) == {"OPEN": 2}
    assert not verdict.holds
    assert verdict.examples == (
        f"term 1, lane 0, producer 1 of {A}: number 1 under way or lost",
        f"term 1, lane 0, producer 1 of {A}: number 4 under way or lost",
    )


def test_a_later_term_takes_over_what_was_left() -> None:
    assert holes(judged(origin(3, 3), origin(1, 1, term=2))) == {"HANDED_OVER": 2}
    # In another lane, too: the term as a whole has ended.
    assert holes(judged(origin(3, 3), origin(1, 1, term=2, lane=5))) == {"HANDED_OVER": 2}


@pytest.mark.parametrize("producer", [0, 2])  # numbers of producers are random
def test_a_later_producer_takes_over_its_lane_only(producer: int) -> None:
    verdict = judged(origin(3, 3), origin(1, 1, producer=producer), origin(2, 4, lane=1))
    assert holes(verdict) == {"HANDED_OVER": 2, "OPEN": 1}
    assert "lane 1" in verdict.examples[0]


def test_another_outbox_explains_nothing() -> None:
    assert holes(judged(origin(2, 2), origin(1, 1, term=9, incarnation=B))) == {"OPEN": 1}


def test_a_notice_explains_its_number_only() -> None:
    stream = Stream(A, 1, 0, 1)
    verdict = judged(origin(1, 1), origin(6, 6), given_up=[(stream, 3), (stream, 9), (Stream(A, 1, 1, 1), 2)])
    assert holes(verdict) == {"GIVEN_UP": 1, "OPEN": 3}
    assert [example.partition("number ")[2] for example in verdict.examples] == [
        "2 under way or lost",
        "4 to 5 under way or lost",
    ]


def test_a_retry_keeps_its_number_and_is_a_repeat() -> None:
    verdict = judged(origin(1, 7), origin(1, 7), origin(1, 7, term=2))
    assert verdict.holds
    assert verdict.repeats == 2


def test_two_ids_of_one_number_clash() -> None:
    verdict = judged(origin(1, 7), origin(1, 8), origin(1, 7), origin(2, 9))
    assert verdict.clashes == 1
    assert not verdict.holds
    assert verdict.examples == (f"term 1, lane 0, producer 1 of {A}: number 1 has several ids",)


def test_equal_ids_of_two_incarnations_are_no_repeat() -> None:
    assert judged(origin(1, 7), origin(1, 7, incarnation=B)).repeats == 0


def test_examples_are_bounded() -> None:
    verdict = judged(*[origin(number, number) for number in range(2, 100, 2)])
    assert verdict.holes[Hole.OPEN] == 49
    assert len(verdict.examples) == MAX_FINDINGS


INCARNATION = UUID(int=1)

# What becomes of each number: acknowledged, twice so, given up with a notice, or left behind.
fates = st.sampled_from(["sent", "sent", "twice", "given up", "left"])
streams = st.dictionaries(
    st.builds(Stream, st.just(INCARNATION), st.integers(1, 3), st.integers(0, 1), st.integers(1, 2)),
    st.lists(fates, max_size=12),
    max_size=6,
)


@given(streams, st.data())
def test_every_number_below_the_highest_is_accounted_for(found: dict[Stream, list[str]], data: st.DataObject) -> None:
    log: list[Origin] = []
    order = data.draw(st.permutations(list(found)))  # producers' numbers say nothing of who came first
    notices: list[tuple[Stream, int]] = []
    record_id = 0
    for stream, numbers in found.items():
        for number, fate in enumerate(numbers, 1):
            record_id += 1
            one = Origin(stream.incarnation, record_id, stream.term, stream.lane, stream.producer, number, 0)
            log += [one] * {"sent": 1, "twice": 2}.get(fate, 0)
            if fate == "given up":
                notices.append((stream, number))

    sequences = Sequences()
    for one in data.draw(st.permutations(log)):
        sequences.add(one, order.index(Stream(one.incarnation, one.term, one.lane, one.producer)))
    verdict = sequences.judge(notices)

    seen = {stream for stream, numbers in found.items() if {"sent", "twice"} & set(numbers)}
    expected = dict.fromkeys(Hole, 0)
    for stream in seen:
        numbers = found[stream]
        top = max(at for at, fate in enumerate(numbers) if fate in ("sent", "twice"))
        ended = any(
            other.term > stream.term
            or ((other.term, other.lane) == (stream.term, stream.lane) and order.index(other) > order.index(stream))
            for other in seen
        )
        for fate in numbers[:top]:
            if fate == "given up":
                expected[Hole.GIVEN_UP] += 1
            elif fate == "left":
                expected[Hole.HANDED_OVER if ended else Hole.OPEN] += 1
    assert dict(verdict.holes) == expected
    assert verdict.records == len(log)
    assert verdict.repeats == len(log) - len(set(log))
    assert verdict.clashes == 0
    assert verdict.streams == len(seen)
    assert verdict.holds == (expected[Hole.OPEN] == 0)
