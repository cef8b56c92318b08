"""Faults aimed at named places of a harvester (`harvester.failpoints`), where chance would seldom strike.

`shard.reports`: records are acknowledged and not purged (at least once). Of a transaction (exactly once):
`shard.commit`: all is sent, nothing is committed; `shard.committed`: Kafka has committed, the database has deleted
nothing; `lane.fenced`: somebody has fenced a lane, and not read its progress.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from signal import SIGKILL

from harvester.stack.processes import identify, send

from .field import Field
from .process import Process

PLACES = {
    "with a full wire": "shard.reports",
    "at a commit": "shard.commit",
    "after a commit": "shard.committed",
    "at a fenced lane": "lane.fenced",
}
_COMES_WITHIN_S = 8.0
_GATHERS_S = 0.3  # so that nearly every key has a record on the wire
_LOOK_S = 0.01


def is_aimed(kind: str) -> bool:
    """Whether this is one of them."""
    return kind.endswith(tuple(PLACES))


def strike(field: Field, kind: str, hold_s: float, rng: random.Random) -> str | None:
    """Hold whoever comes to the place; kill or freeze it, or its harvester, there. None: nobody has come."""
    when = next(when for when in PLACES if kind.endswith(when))
    leader = field.leader()
    if leader is None or leader.setup.once == (PLACES[when] == "shard.reports"):
        return None
    with _held(field.plan.directory, PLACES[when]) as place:
        if PLACES[when] == "lane.fenced":
            _make_open(leader, rng)
        pid = place.wait()
        process = _owner(field, pid) if pid is not None else None
        if pid is None or process is None:
            return None
        if PLACES[when] == "shard.reports":
            time.sleep(_GATHERS_S)
        if kind.startswith("kill shard"):
            shard = identify(pid)
            if shard is not None:
                send(shard, SIGKILL)
        elif kind.startswith("kill leader"):
            field.kill(process)
            field.start(process.slot)
        else:
            with process.standing_still([process.identity, *process.family()]):
                place.release()  # only the one that stands there shall be held, and only as long as it stands
                time.sleep(hold_s)
        return process.name


def _make_open(leader: Process, rng: random.Random) -> None:
    """Lanes are opened at a take-over, or when a shard is replaced."""
    shards = leader.shards()
    if shards:
        send(rng.choice(shards), SIGKILL)


def _owner(field: Field, pid: int) -> Process | None:
    for process in field.alive():
        if pid in {process.identity.pid, *(shard.pid for shard in process.shards())}:
            return process
    return None


class _Place:
    """Files that the hooks look for; see `tests.support.hooks`."""

    def __init__(self, directory: Path, name: str) -> None:
        self._block, self._reached = directory / f"{name}.block", directory / f"{name}.reached"

    def hold(self) -> None:
        self._reached.unlink(missing_ok=True)
        self._block.touch()

    def release(self) -> None:
        self._block.unlink(missing_ok=True)
        self._reached.unlink(missing_ok=True)

    def wait(self) -> int | None:
        """The process that has come; None when none does."""
        deadline = time.monotonic() + _COMES_WITHIN_S
        while time.monotonic() < deadline:
            text = self._reached.read_text() if self._reached.exists() else ""
            if text:
                return int(text)
            time.sleep(_LOOK_S)
        return None


@contextmanager
def _held(directory: Path, name: str) -> Iterator[_Place]:
    place = _Place(directory, name)
    place.hold()
    try:
        yield place
    finally:
        place.release()
