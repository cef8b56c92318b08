"""Sequences against a small relay that numbers, loses, repeats and gives up as it is told."""

from __future__ import annotations

from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st

from harvester.origin import Origin
from harvester.verify.sequences import Hole, Sequences, Stream

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
