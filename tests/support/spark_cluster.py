"""The run's Spark cluster: one for all workers, started by the first test that asks, ended when the run is over.

A test has it to itself, since its tests kill parts of it. Whoever starts it leaves a process behind,
`python -m tests.support.spark_cluster DIRECTORY PID`, which ends the cluster as soon as that process is gone.
"""

from __future__ import annotations

import fcntl
import os
import select
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from harvester.pipeline.errors import SparkUnavailable
from harvester.pipeline.session import use_java
from scripts.cluster.cluster import Cluster

RUN_DIRECTORY = "HARVESTER_TEST_DIRECTORY"

CONF = {"spark.executor.memory": "512m", "spark.cores.max": "2", "spark.executor.cores": "1"}
"""What an application asks of it: an executor on each worker."""


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A master and two workers that run; skips where there is no Java that Spark runs on."""
    try:
        use_java()
    except SparkUnavailable as error:
        pytest.skip(error.message)
    home = Path(os.environ[RUN_DIRECTORY] + "-spark")
    with _alone(home):
        made = Cluster(home)
        if not (home / "cluster.json").exists():
            _end_with_the_run(home)
        made.up()
        yield made


@contextmanager
def _alone(home: Path) -> Iterator[None]:
    home.mkdir(exist_ok=True)
    with (home / "test.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _end_with_the_run(home: Path) -> None:
    beginner = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
    subprocess.Popen(
        [sys.executable, "-m", __name__, str(home), str(beginner)],
        cwd=Path(__file__).parents[2],
        start_new_session=True,
        stdin=subprocess.DEVNULL,
    )


def main() -> None:
    """Wait for the end of the process that is named, then end the cluster."""
    home, pid = Path(sys.argv[1]), int(sys.argv[2])
    try:
        handle = os.pidfd_open(pid)
        select.select([handle], [], [])
    except ProcessLookupError:
        pass
    Cluster(home).down()
    shutil.rmtree(home, ignore_errors=True)


if __name__ == "__main__":
    main()
