"""A drain whose processes are killed in the middle of a slice: nothing is lost, first deliveries keep their order."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from harvester.pipeline.drain import job as drain
from tests.support.drains import ONE_BY_ONE, RECORDS, assert_held
from tests.support.drivers import START_S
from tests.support.longs import long
from tests.support.wait import eventually

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.support.drains import SliceDrain

pytestmark = pytest.mark.servers


@long  # test_drain has leases, and a slice that is late
def test_a_killed_driver_is_followed_by_one_that_waits_for_its_lease(
    slice_drain: SliceDrain, spark: SparkSession
) -> None:
    with slice_drain.start("--lease=20s", *ONE_BY_ONE) as running:
        slice_drain.await_sent(running, 100)
        running.kill()
    assert 100 <= slice_drain.sent() < RECORDS, running.output
    assert slice_drain.left() == RECORDS

    said: list[str] = []
    settings = drain.DrainSettings(
        slice_drain.config(), {"bootstrap.servers": slice_drain.servers.bootstrap}, timedelta(seconds=30)
    )
    report = drain.run(spark, settings, waiting=said.append)

    assert report.records == RECORDS
    assert any("has borrowed the term" in line for line in said), said
    assert_held(slice_drain.judged())


@long  # Spark repeats the task; test_drain has what follows from that
def test_a_killed_executor_is_replaced_and_the_task_starts_over(slice_drain: SliceDrain) -> None:
    given = ("--lease=180s", "--kafka=delivery.timeout.ms=15000", *ONE_BY_ONE)
    with slice_drain.start(*given, master="local-cluster[1,1,1024]") as running:
        word = b"CoarseGrainedExecutorBackend"
        # To look for it only when it has begun would take too long.
        [executor, *_] = eventually(lambda: descendants(running.pid, word), START_S, "the executor")
        slice_drain.await_sent(running, 100)
        os.kill(executor, signal.SIGKILL)
        assert slice_drain.sent() < RECORDS
        assert slice_drain.left() == RECORDS
        assert running.wait(START_S) == 0, running.output
        assert "a task was repeated: what it sent before may still arrive for 15 s" in running.output
    assert_held(slice_drain.judged())


def descendants(pid: int, word: bytes) -> list[int]:
    """Processes below this one whose command line has the word in it."""
    parents: dict[int, int] = {}
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            parents[int(place.name)] = int((place / "stat").read_text().rpartition(")")[2].split()[1])
    found = []
    for child in parents:
        above = child
        while above in parents and above != pid:
            above = parents[above]
        with suppress(OSError):
            if above == pid and word in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(child)
    return found
