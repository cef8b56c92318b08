"""Harvesters as families of processes, each in a process group of its own: to be killed, frozen, starved, counted.

with family(scene, "one") as one, family(scene, "two") as two:
    one.wait_leads()
    one.freeze()
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harvester.delivery.partitioner import shard_of

from .cli import RunningCli
from .harvesting import Scene, alive, children, messages, shards_of, wait_leads
from .wait import eventually
from .writing import Load

SHARDS = 2

# A successor leads after 4 s; the delivery timeout that follows is 1.5 s.
QUICK: Mapping[str, Any] = {"heartbeat_timeout": "1s", "session_timeout": "4s", "drain_interval": "2s"}

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Family:
    """A harvester that runs: the supervisor, its shards and its helpers."""

    def __init__(self, scene: Scene, running: RunningCli) -> None:
        self.scene, self.running = scene, running
        self.pid = running.pid

    def wait_leads(self) -> tuple[str, int]:
        """(leader id, term) once it has come to lead for the first time."""
        return wait_leads(self.running)

    @property
    def shards(self) -> list[int]:
        """Processes of the shards that live, oldest first: at the start that is by index."""
        return sorted(shards_of(self.pid))

    def wait_replaced(self, *gone: int) -> None:
        """Until these shards are dead and all places are taken by others."""

        def replaced() -> bool:
            now = self.shards
            return len(now) == SHARDS and not set(gone) & set(now) and not any(map(alive, gone))

        eventually(replaced, what="new shards")

    def everyone(self) -> list[int]:
        """All processes of the group, the supervisor first."""
        return [self.pid, *descendants(self.pid)]

    def freeze(self, *pids: int) -> None:
        """SIGSTOP to these, or to the whole group."""
        self._signal(signal.SIGSTOP, pids)

    def thaw(self, *pids: int) -> None:
        """The end of `freeze`."""
        self._signal(signal.SIGCONT, pids)

    def kill(self, *pids: int) -> None:
        """SIGKILL to these, or to the whole group at once."""
        self._signal(signal.SIGKILL, pids)

    def stop(self) -> float:
        """A planned stop, which has to succeed; when it had ended, by the wall clock."""
        code = self.running.stop()
        ended_at = time.time()
        assert code == 0, self.running.output
        return ended_at

    @property
    def deaths(self) -> int:
        """How many of its shards died unasked: by a test's hand, or killed for a silence that a busy machine caused."""
        return sum("ended unexpectedly" in message for message in messages(self.running))

    @property
    def terms(self) -> list[int]:
        """Under which it came to lead, in order."""
        found = (re.search(r"leads as \S+ under term (\d+)", message) for message in messages(self.running))
        return [int(match[1]) for match in found if match]

    def cpu_s(self) -> float:
        """CPU seconds that its living processes have used."""
        return sum(cpu_s(pid) for pid in self.everyone())

    def _signal(self, number: signal.Signals, pids: Sequence[int]) -> None:
        with contextlib.suppress(ProcessLookupError):
            if not pids:
                os.killpg(self.pid, number)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


@contextmanager
def family(scene: Scene, name: str, *, hooks: bool = False, **given: Any) -> Iterator[Family]:
    """A harvester of the scene with two shards; killed whole at the end if the test did not stop it."""
    file = scene.config_file(name, **given)
    env = scene.plan.env if hooks else None
    with RunningCli("start", "-f", str(file), "--shards", str(SHARDS), env=env, session=True) as running:
        made = Family(scene, running)
        try:
            yield made
        finally:
            made.kill()


@contextmanager
def full_wire(scene: Scene, load: Load) -> Iterator[None]:
    """For the length of the block what was acknowledged is not purged, nor sent what waits behind it: nearly every
    key has a record in flight. For families with hooks."""
    with scene.plan.blocked("shard.reports") as reached:
        reached()
        load.wait(200)
        yield


def wait_sent(scene: Scene, load: Load) -> None:
    """On a full wire: until every key has its record at Kafka, so that no shard is about to send one.

    A process that freezes between its last look at the clock and the write to the socket writes when it thaws: the one
    late repeat that docs/guarantees.md speaks of, which is not what a test of the looks is about.
    """
    sent, before = len(scene.log()), -1
    while sent != before:
        load.wait(100)
        sent, before = len(scene.log()), sent


def descendants(pid: int) -> list[int]:
    """Children, their children, and so on."""
    found = []
    for child in children(pid):
        found += [child, *descendants(child)]
    return found


def wait_gone(pids: Sequence[int], timeout_s: float = 10.0) -> None:
    """Until none of these processes exists."""
    eventually(lambda: not [pid for pid in pids if alive(pid)], timeout_s, f"the end of {list(pids)}")


def wait_members(scene: Scene, count: int) -> None:
    """Until the coordinator counts this many members of a group that is at rest."""
    from confluent_kafka import KafkaError, KafkaException
    from confluent_kafka.admin import AdminClient

    admin = AdminClient({"bootstrap.servers": scene.bootstrap, "broker.address.family": "v4"})

    # A new broker's first groups have no coordinator at once.
    moving = {KafkaError.NOT_COORDINATOR, KafkaError.COORDINATOR_LOAD_IN_PROGRESS, KafkaError.COORDINATOR_NOT_AVAILABLE}

    def members() -> int:
        try:
            described = admin.describe_consumer_groups([scene.group])[scene.group].result(10)
        except KafkaException as error:
            if error.args[0].code() in moving:
                return -1
            raise
        return len(described.members) if described.state.name == "STABLE" else -1

    eventually(lambda: members() == count, 60.0, f"{count} members", interval_s=0.05)


def slice_of(key: str) -> int:
    """The shard, of two, that this key belongs to."""
    return shard_of(key.encode(), 0, SHARDS)


def cpu_s(pid: int) -> float:
    """CPU seconds that a process has used; 0 when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def pass_time(seconds: float) -> None:
    """Let time pass, where a length of time is what the fault is."""
    end = time.monotonic() + seconds
    eventually(lambda: time.monotonic() >= end, seconds + 60, longest_interval_s=0.01)
