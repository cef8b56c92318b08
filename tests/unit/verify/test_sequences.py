"""Holes in sequences, and what explains them."""

from __future__ import annotations

from uuid import UUID

import pytest

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


def test_an_id_that_stands_elsewhere_is_not_lost() -> None:
    stream = Stream(A, 1, 0, 1)
    log = [origin(1, 1), origin(4, 4), origin(1, 12, lane=1)]
    assert holes(judged(*log, assigned={(stream, 2): 12, (stream, 3): 13})) == {"ELSEWHERE": 1, "OPEN": 1}


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
