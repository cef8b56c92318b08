"""The supervisor's end of a shard's pipe pair: it never waits, and says when enough is enough."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from io import FileIO

import pytest

from harvester.relay.core.frames import Dispatch, Frame, Settled, Splitter, encode
from harvester.relay.ipc import Channel, be_present, take_all

ROWS = Dispatch(1, b"x" * 500_000)
Ends = tuple[Channel, FileIO, FileIO]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """A channel, and the shard's ends: to read from, to write to."""
    (to_read, to_shard), (from_shard, answers) = os.pipe(), os.pipe()
    channel = Channel(from_shard, to_shard)
    # As files: closed a second time, a descriptor may be one that another thread has opened since.
    with FileIO(to_read) as reader, FileIO(answers, "w") as writer:
        yield channel, reader, writer
    channel.close()


def test_what_the_pipe_does_not_take_is_kept_in_order_and_only_much_of_it_is_congestion(
    ends: Ends,
) -> None:
    channel, to_read, _ = ends
    states: list[tuple[bool, bool]] = []
    while (True, True) not in states:
        congested = channel.send(ROWS)
        states.append((bool(channel.outbound), congested))
    assert (True, False) in states
    sent = len(states)
    assert 9 <= sent <= 12  # a megabyte in the pipe, four behind it
    splitter = Splitter()
    found: list[Frame] = []
    while channel.outbound or len(found) < sent:
        found += splitter.feed(os.read(to_read.fileno(), 1 << 20))
        channel.flush()
    assert found == [ROWS] * sent
    assert not channel.flush()


def test_a_broken_pipe_drops_what_waits(ends: Ends) -> None:
    channel, to_read, _ = ends
    while not channel.send(ROWS):
        pass
    to_read.close()
    assert not channel.flush()
    assert not channel.outbound


def test_answers_are_read_to_their_end(ends: Ends) -> None:
    channel, _, answers = ends
    assert list(channel.receive()) == []
    os.write(answers.fileno(), encode(Settled([1, 2])))
    assert list(channel.receive()) == [Settled([1, 2])]
    answers.close()
    with pytest.raises(EOFError):
        list(channel.receive())


def test_who_is_present_keeps_others_from_taking_all_until_it_dies() -> None:
    memory = os.memfd_create("test")
    ready, begin = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(begin, bytes([be_present(memory)]))
        signal.pause()
    try:
        assert os.read(ready, 1) == b"\x01"
        assert not take_all(memory)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert take_all(memory)
    late = os.fork()
    if late == 0:
        os._exit(be_present(memory))
    assert os.waitstatus_to_exitcode(os.waitpid(late, 0)[1]) == 0, "from then on none can be present"
    for fd in (memory, ready, begin):
        os.close(fd)
