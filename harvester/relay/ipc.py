"""Communication between supervisor and shards: pipes, shared memory, and a waker for threads that wait for descriptors.

*Pipes* (P16). The supervisor never blocks. It writes as much as the pipe accepts and keeps the rest; when much is left
(the pipe is congested), the relay holds that shard's rows back. It reads whatever has arrived. So the shard, whose
writes do block, always finds its reader reading.

*Shared memory*. A few numbers, each written by a single process: the supervisor, or a shard that records whether it
owes something (`owe`). They have no lock: a shard killed while holding one would hang all others. Each number is one
aligned 64-bit word, so a reader sees either the old value or the new one. The memory itself carries locks that the
kernel releases when their holder dies: a shard is *present* for as long as it lives (`be_present`), and a process for
which `take_all` is true knows that no shard lives, and that none will while it lives itself.

Trust is a point in time of CLOCK_BOOTTIME, which runs through suspend. `harvester.neli.election` sets it and withdraws
it; shards compare it with the clock before every record (`trust_check`), so that it expires even while nobody can tell
them. Within the supervisor several threads change it (the group member extends it, the relay opens and closes it);
`TrustCell` serialises them with a lock of its own process.
"""

from __future__ import annotations

import fcntl
import os
import pickle
import select
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, MutableSequence
from time import CLOCK_BOOTTIME, clock_gettime_ns
from typing import Any

from harvester.clock import clock_s
from harvester.relay.core.frames import MAX_ANSWER_BYTES, Frame, Splitter, encode

_PIPE_BYTES = 1 << 20
_READ_BYTES = 1 << 16  # a larger buffer would be a fresh memory mapping for every read
_LOOK_AGAIN_MS = 250
# A pipe holds a third of what a shard may have to do. Rows held back have to be read again, so this is for a shard that
# accepts nothing, not for a busy one.
_SLACK_BYTES = 1 << 22


def widen(fd: int) -> None:
    """Ask for a larger pipe; an unprivileged process may be refused, which only costs speed."""
    try:
        fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    except OSError:
        return


def _write(fd: int, waiting: deque[memoryview]) -> int:
    """Write what a non-blocking pipe accepts now, and keep the rest; returns how many bytes were written.

    Raises OSError if the pipe is broken.
    """
    total = 0
    while waiting:
        data = waiting[0]
        try:
            written = os.write(fd, data)
        except BlockingIOError:
            break
        total += written
        if written == len(data):
            waiting.popleft()
        else:
            waiting[0] = data[written:]
    return total


class Channel:
    """The supervisor's end: non-blocking in both directions."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self.read_fd, self.write_fd = read_fd, write_fd
        for fd in (read_fd, write_fd):
            os.set_blocking(fd, False)
            widen(fd)
        self.outbound: deque[memoryview] = deque()  # waits until the pipe accepts it
        self._waiting_bytes = 0
        self._splitter = Splitter(MAX_ANSWER_BYTES)

    def send(self, frame: Frame) -> bool:
        """Write the frame, or keep what the pipe does not accept; returns the same as `flush`.

        On a broken pipe the frame is dropped: the shard is dead.
        """
        data = encode(frame)
        self.outbound.append(memoryview(data))
        self._waiting_bytes += len(data)
        return self.flush()

    def flush(self) -> bool:
        """Write what the pipe accepts now. Returns whether it is congested: too much is waiting for more to be sent."""
        try:
            self._waiting_bytes -= _write(self.write_fd, self.outbound)
        except BrokenPipeError:
            self.outbound.clear()
            self._waiting_bytes = 0
        return self._waiting_bytes > _SLACK_BYTES

    def receive(self) -> Iterator[Frame]:
        """Frames that have arrived; raises EOFError when the shard has closed its end and everything is read."""
        while True:
            try:
                data = os.read(self.read_fd, _READ_BYTES)
            except BlockingIOError:
                return
            if not data:
                raise EOFError
            yield from self._splitter.feed(data)
            if len(data) < _READ_BYTES:
                return

    def close(self) -> None:
        """Close both ends; the shard takes that as the end of the supervisor."""
        for fd in (self.read_fd, self.write_fd):
            os.close(fd)


class ShardPipe:
    """The shard's end: any thread may write, and blocks while the pipe is full; one thread reads."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self.read_fd, self._write_fd = read_fd, write_fd
        os.set_blocking(write_fd, False)
        self._lock = threading.Lock()  # of this process only
        self._splitter = Splitter()
        self._deadline: float | None = None
        self._room = select.poll()
        self._room.register(write_fd, select.POLLOUT)

    def give_up_after(self, within_s: float) -> None:
        """The shutdown has begun: a supervisor that does not read may block writes for this long at most."""
        self._deadline = time.monotonic() + within_s

    def send(self, frame: Frame) -> None:
        """Write the whole frame; silently gives up when the supervisor is gone."""
        data = memoryview(encode(frame))
        with self._lock:
            while data:
                try:
                    data = data[os.write(self._write_fd, data) :]
                except BrokenPipeError:
                    return
                except BlockingIOError:
                    if self._deadline is not None and time.monotonic() >= self._deadline:
                        return
                    self._room.poll(_LOOK_AGAIN_MS)

    def receive(self) -> Iterator[Frame]:
        """Frames of one read, which blocks until there is one; raises EOFError when the supervisor is gone."""
        data = os.read(self.read_fd, _READ_BYTES)
        if not data:
            raise EOFError
        yield from self._splitter.feed(data)


_LENGTH = struct.Struct("=I")


class MessagePipe:
    """The writing end of a pipe for pickled messages, for any thread. It never blocks: what the pipe does not accept is
    kept and written with the next message.
    """

    def __init__(self, fd: int) -> None:
        """Takes ownership of the descriptor."""
        os.set_blocking(fd, False)
        widen(fd)
        self._fd = fd
        self._lock = threading.Lock()  # of this process only
        self._waiting: deque[memoryview] = deque()
        self.waiting_bytes = 0

    def send(self, message: Any, *, dispensable: bool = False) -> bool:
        """Whether it was sent or kept: false if nobody reads any more, and, if dispensable, while others wait."""
        data = pickle.dumps(message)
        with self._lock:
            if not self._flush() or (dispensable and self._waiting):
                return False
            self._waiting.append(memoryview(_LENGTH.pack(len(data)) + data))
            self.waiting_bytes += _LENGTH.size + len(data)
            return self._flush()

    def flush(self) -> None:
        """Write as much of what waits as the pipe accepts now."""
        with self._lock:
            self._flush()

    def close(self) -> None:
        """Close the end; the reader sees EOF."""
        with self._lock:
            os.close(self._fd)
            self._fd = -1

    def _flush(self) -> bool:
        """False when nobody reads any more."""
        try:
            self.waiting_bytes -= _write(self._fd, self._waiting)
        except OSError:
            return False
        return True


class MessageReader:
    """The reading end, for one thread."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._data = bytearray()

    def receive(self) -> list[Any]:
        """The messages of one read, which blocks until there are any; raises EOFError when nobody writes any more."""
        data = os.read(self._fd, _READ_BYTES)
        if not data:
            raise EOFError
        self._data += data
        messages = []
        while len(self._data) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._data)[0]
            if len(self._data) < end:
                break
            messages.append(pickle.loads(self._data[_LENGTH.size : end]))  # noqa: S301 - from a process of ours
            del self._data[:end]
        return messages


class Waker:
    """An eventfd with an owner: `set` after `close` does nothing, and never reaches a reused descriptor."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._closed = False

    def set(self) -> None:
        with self._lock:
            if not self._closed:
                os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        """Make `fd` unreadable; called by the thread that waits for it."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self.fd)


_MOST_SHARDS = 256  # what a configuration and `scale` allow
_TRUST, _IN_FLIGHT, _LIMIT, _TURNED, _MARKS, _LISTENED, _OWES = range(7)
WORDS = _OWES + _MOST_SHARDS

Shared = MutableSequence[int]  # WORDS signed 64-bit integers


def trust_check(shared: Shared) -> Callable[[], bool]:
    """A function that returns whether a shard may produce a record now (P12); called once per record."""

    def trusted() -> bool:
        return clock_gettime_ns(CLOCK_BOOTTIME) < shared[_TRUST]

    return trusted


def set_in_flight(shared: Shared, records: int, limit: int) -> None:
    """Publish how many records producers may hold now, and the limit."""
    shared[_IN_FLIGHT] = records
    shared[_LIMIT] = limit


def in_flight(shared: Shared) -> tuple[int, int]:
    """(records in flight over all shards, max_in_flight_records)."""
    return shared[_IN_FLIGHT], shared[_LIMIT]


_STANDS_STILL_S = 5.0


def turn(shared: Shared, *, marks: bool) -> None:
    """The relay's thread turns; `marks`: so does the mark loop."""
    shared[_MARKS] = marks
    shared[_TURNED] = clock_gettime_ns(CLOCK_BOOTTIME)


def turned_s(shared: Shared) -> float:
    """When the relay's thread last turned, by CLOCK_BOOTTIME."""
    return shared[_TURNED] / 1e9


def marks_live(shared: Shared) -> bool:
    """Liveness for the election (P14): relay and mark loop both turn."""
    return bool(shared[_MARKS]) and clock_s() - turned_s(shared) < _STANDS_STILL_S


def listen(shared: Shared) -> None:
    """The supervisor's thread that receives proofs turns now."""
    shared[_LISTENED] = clock_gettime_ns(CLOCK_BOOTTIME)


def listened_s(shared: Shared) -> float:
    """When that thread last turned, by CLOCK_BOOTTIME."""
    return shared[_LISTENED] / 1e9


def owe(shared: Shared, index: int, *, owes: bool) -> None:
    """Record whether something of this shard may be on the wire after it has ended. Initially it may."""
    shared[_OWES + index] = owes


def is_owed(shared: Shared) -> bool:
    """Whether something of an ended shard may be on the wire."""
    return any(shared[_OWES:])


def be_present(memory: int) -> bool:
    """Declare, until this process ends, that it may publish. False: it must not any more.

    From then on this process must close no descriptor of that memory: the kernel would release the lock.
    """
    return _locked(memory, fcntl.LOCK_SH)


def take_all(memory: int) -> bool:
    """Whether no process is present; if so, none can be while this one lives."""
    return _locked(memory, fcntl.LOCK_EX)


def _locked(memory: int, how: int) -> bool:
    try:
        fcntl.lockf(memory, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class TrustCell:
    """The supervisor's side of the trust word. It is 0 while closed; opening requires unexpired trust."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._lock = threading.Lock()
        self._open = False
        self._until_s = 0.0
        shared[_TRUST] = 0

    def extend(self, until_s: float) -> None:
        """The election proved leadership up to `until_s`."""
        with self._lock:
            self._until_s = until_s
            if self._open:
                self._shared[_TRUST] = int(until_s * 1e9)

    def revoke(self) -> None:
        """The election fenced: nothing is proved any more."""
        with self._lock:
            self._until_s = 0.0
            self._open = False
            self._shared[_TRUST] = 0

    def open(self) -> None:
        """Let shards produce up to the proven moment, and beyond it as the election proves more."""
        with self._lock:
            self._open = True
            self._shared[_TRUST] = int(self._until_s * 1e9)

    def close(self) -> None:
        """No shard may produce; what the election has proved is kept for the next opening."""
        with self._lock:
            self._open = False
            self._shared[_TRUST] = 0

    @property
    def trusted(self) -> bool:
        """Whether leadership is proven now, whether open or closed."""
        return clock_s() < self._until_s
