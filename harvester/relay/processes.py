"""Shard processes: spawned, never forked, and without the host's main module.

`multiprocess` runs the parent's `__main__` again in a spawned child, which an embedding application would have to
guard against. A shard needs nothing of it, so its preparation data leaves the main module out.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from typing import Any

import multiprocess
from multiprocess import resource_tracker, spawn

from harvester.relay.pipes import Channel
from harvester.relay.shard import main
from harvester.relay.shared import WORDS, Shared
from harvester.relay.spec import ShardSpec

_NAME = "harvester-shard-"
_context: Any = multiprocess.get_context("spawn")
_prepare = spawn.get_preparation_data


def _prepare_without_main(name: str) -> dict[str, Any]:
    data: dict[str, Any] = _prepare(name)
    if name.startswith(_NAME):
        data.pop("init_main_from_name", None)
        data.pop("init_main_from_path", None)
    return data


spawn.get_preparation_data = _prepare_without_main


def shared_memory() -> Shared:
    """The words of `harvester.relay.shared`, inherited by every shard."""
    words: Shared = _context.RawArray("q", WORDS)
    return words


@dataclass(slots=True, eq=False)
class ShardProcess:
    """A running shard: its process and the supervisor's ends of its pipes."""

    index: int
    process: Any
    channel: Channel
    pid: int

    @property
    def sentinel(self) -> int:
        """Readable when the process has ended."""
        fd: int = self.process.sentinel
        return fd

    def kill(self) -> None:
        """SIGKILL, which also ends a stopped process."""
        self.process.kill()

    def reap(self) -> int | None:
        """SIGKILL and waitpid (P15); returns the exit code."""
        self.process.kill()
        self.process.join()
        code: int | None = self.process.exitcode
        self.process.close()
        return code


def start_shard(spec: ShardSpec, shared: Shared) -> ShardProcess:
    """Spawn one shard."""
    to_shard_read, to_shard_write = _context.Pipe(duplex=False)
    from_shard_read, from_shard_write = _context.Pipe(duplex=False)
    process = _context.Process(
        target=main, args=(spec, to_shard_read, from_shard_write, shared), name=f"{_NAME}{spec.index}", daemon=False
    )
    resource_tracker.ensure_running()  # it is spawned unmasked otherwise, and unmasks us
    # Ctrl-C reaches the whole group. A shard ignores it once it runs; until then the mask it inherits keeps it off.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    channel = Channel(os.dup(from_shard_read.fileno()), os.dup(to_shard_write.fileno()))
    for connection in (to_shard_read, to_shard_write, from_shard_read, from_shard_write):
        connection.close()
    return ShardProcess(spec.index, process, channel, process.pid)
