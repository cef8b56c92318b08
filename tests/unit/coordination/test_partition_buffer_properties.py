"""Any order of handing out, finishing, opening anew and fetching: the prefix is what a plain list says it is."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from harvester.coordination.core.messages import GroupPartition
from harvester.coordination.core.partition_buffer import PartitionBuffer
from tests.support.longs import some_of


@dataclass(eq=False)
class Message:
    number: int

    def offset(self) -> int:
        return self.number


WHAT = st.sampled_from([
    "do", "do", "fetch", "take", "take", "next", "next", "any", "any", "open", "end", "some", "last", "last",
    "close", "turn",
])  # fmt: skip
MOST = 6  # open records
STEPS = st.lists(st.tuples(WHAT, st.integers(0, 63)), min_size=5)


@settings(max_examples=some_of(200))
@given(STEPS)
def test_the_prefix_ends_before_the_first_record_that_is_not_finished(steps: list[tuple[str, int]]) -> None:
    buffer = PartitionBuffer(GroupPartition("g", "t", 0), 1, None)
    following = 0
    handed_out: list[Message] = []
    finished: set[int] = set()
    for what, which in [("fetch", 5), ("open", 0), *steps]:
        batch = buffer.batch
        if what == "fetch":
            records = [Message(following + 2 * each) for each in range(which % 5 + 1)]  # with holes in the offsets
            following = records[-1].offset() + 1
            buffer.fetch(records)
        elif what == "open" and buffer.fetched and buffer.open_records < MOST:
            buffer.open_batch(MOST - buffer.open_records).until = 1.0
        elif what == "end" and batch is not None:
            batch.end()
        elif what == "close":
            buffer.close_batch()
        elif what == "turn":  # of the coordination's thread
            if buffer.busy:
                buffer.reported = buffer.last_offset
                buffer.look(MOST, float(which))
                buffer.note_idle()
            idle = buffer.is_empty and buffer.batch is None
            assert (buffer.reported, buffer.busy) == (buffer.last_offset, not idle)
            assert (buffer.full_since is not None) == (buffer.open_records >= MOST)
            assert (buffer.open(64.0) is not None) == bool(buffer.open_records)
        if what in ("take", "do") and batch is not None:
            record = batch.take(0.0)
            if record is not None:
                handed_out.append(record)
        if what == "some" and batch is not None:
            some = batch.take_some(which % 4 + 1, 0.0)
            assert not some or batch.until > 0
            handed_out += some
        if what == "last" and handed_out:
            first = which // 5 % len(handed_out)
            records = handed_out[first : first + which % 5 + 1] if which % 2 else handed_out[-(which % 5 + 1) :]
            finished |= {record.offset() for record in records}
            if which % 3 == 0 or batch is None or not batch.finish_some(records):
                buffer.finish(*(record.offset() for record in records))
        if what in ("next", "any", "do") and handed_out:
            record = handed_out[which % len(handed_out)] if what == "any" else handed_out[-1]
            finished.add(record.offset())
            if batch is None or not batch.finish(record):
                buffer.finish(record.offset())
        _check(buffer, handed_out, finished)


def _check(buffer: PartitionBuffer, handed_out: list[Message], finished: set[int]) -> None:
    offsets = [record.offset() for record in handed_out]
    assert offsets == sorted(set(offsets))
    prefix = None
    for offset in offsets:
        if offset not in finished:
            break
        prefix = offset
    behind = [offset for offset in offsets if prefix is None or offset > prefix]
    assert buffer.last_offset == prefix
    assert buffer.open_records == len(behind) <= MOST
    assert buffer.first_open == (behind[0] if behind else None)
