"""The two ends of a shard's pipe pair.

P16: the supervisor never blocks. It writes what the pipe takes and keeps the rest; when that is much
(`Channel.congested`) the relay holds that shard's rows back. It reads whatever has arrived. So the shard, whose writes
do block, always finds its reader reading.
"""

from __future__ import annotations

import fcntl
import os
import select
import threading
import time
from collections import deque
from collections.abc import Iterator

from harvester.relay.frames import Frame
from harvester.relay.framing import MAX_ANSWER_BYTES, Splitter, encode

_PIPE_BYTES = 1 << 20
_READ_BYTES = 1 << 16  # a larger buffer is a fresh mapping for every read
_LOOK_AGAIN_MS = 250
# A pipe holds a third of what a shard may have to do. To hold rows back means to read them again, so it is for a shard
# that takes nothing, and not for one that is busy.
_SLACK_BYTES = 1 << 22


def widen(fd: int) -> None:
    """Ask for a larger pipe; an unprivileged process may be refused, which costs speed only."""
    try:
        fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    except OSError:
        return


class Channel:
    """The supervisor's end: non-blocking both ways."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self.read_fd, self.write_fd = read_fd, write_fd
        for fd in (read_fd, write_fd):
            os.set_blocking(fd, False)
            widen(fd)
        self._outbound: deque[memoryview] = deque()
        self._waiting_bytes = 0
        self._splitter = Splitter(MAX_ANSWER_BYTES)

    @property
    def congested(self) -> bool:
        """Whether so much waits until the pipe takes it that no more should come."""
        return self._waiting_bytes > _SLACK_BYTES

    @property
    def is_waiting(self) -> bool:
        """Whether anything waits until the pipe takes it."""
        return bool(self._outbound)

    def send(self, frame: Frame) -> None:
        """Write the frame, or keep what the pipe does not take. A broken pipe drops it: the shard is dead."""
        data = encode(frame)
        self._outbound.append(memoryview(data))
        self._waiting_bytes += len(data)
        self.flush()

    def flush(self) -> None:
        """Write what the pipe takes now."""
        outbound = self._outbound
        while outbound:
            data = outbound[0]
            try:
                written = os.write(self.write_fd, data)
            except BlockingIOError:
                return
            except BrokenPipeError:
                outbound.clear()
                self._waiting_bytes = 0
                return
            self._waiting_bytes -= written
            if written == len(data):
                outbound.popleft()
            else:
                outbound[0] = data[written:]

    def receive(self) -> Iterator[Frame]:
        """Frames that have arrived; raises EOFError when the shard has closed its end and all is read."""
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
        """Close both ends: for the shard, the end of the supervisor."""
        for fd in (self.read_fd, self.write_fd):
            os.close(fd)


class ShardPipe:
    """The shard's end: writes from any thread, which wait for room, reads from one."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self.read_fd, self._write_fd = read_fd, write_fd
        os.set_blocking(write_fd, False)
        self._lock = threading.Lock()  # of this process only
        self._splitter = Splitter()
        self._deadline: float | None = None
        self._room = select.poll()
        self._room.register(write_fd, select.POLLOUT)

    def give_up_after(self, within_s: float) -> None:
        """The end has begun: a supervisor that does not read may hold writes up for this long only."""
        self._deadline = time.monotonic() + within_s

    def send(self, frame: Frame) -> None:
        """Write the frame whole; silently gives up when the supervisor is gone."""
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
