"""What each test costs: `scripts/test --costs FILE` writes it down, and `sort -rn FILE` lists the dearest first.

Each worker is a control group (so this needs root), and with it every process that its tests start, however that ends.
The run's shared servers are a group of their own. A line is: CPU seconds, seconds, test or name of a total.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from harvester import stack
from harvester.stack.processes import children_of, identify

FILE = "HARVESTER_TEST_COSTS"
_GROUP = "HARVESTER_TEST_COSTS_GROUP"
_V1 = Path("/sys/fs/cgroup/cpuacct")
_SHARED = "shared"


def pytest_configure(config: pytest.Config) -> None:
    """The process that begins the run makes the group that is the whole."""
    if not hasattr(config, "workerinput"):
        os.environ[_GROUP] = str((_V1 if _V1.is_dir() else Path("/sys/fs/cgroup")) / f"harvester-tests-{os.getpid()}")
        _enter(Path(os.environ[_GROUP]), os.getpid())
    _enter(Path(os.environ[_GROUP]) / str(os.getpid()), os.getpid())


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object]) -> Iterator[None]:
    """Whichever worker has started the servers, they are nobody's."""
    result = yield
    if fixturedef.argname == "servers" and (directory := os.environ.get("HARVESTER_TEST_DIRECTORY")):
        for server in stack.status(Path(directory)).servers:
            if server.pid is not None and (process := identify(server.pid)):
                for each in (process, *children_of(process)):
                    with suppress(ProcessLookupError):  # a session that has just ended
                        _enter(Path(os.environ[_GROUP]) / _SHARED, each.pid)
    return result


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """From a test's set-up to the end of its teardown."""
    own = Path(os.environ[_GROUP]) / str(os.getpid())
    cpu, started = _used_s(own), time.monotonic()
    result = yield
    _write(_used_s(own) - cpu, time.monotonic() - started, item.nodeid)
    return result


def pytest_unconfigure(config: pytest.Config) -> None:
    """The totals, once the workers have ended."""
    if not hasattr(config, "workerinput"):
        _write(_used_s(Path(os.environ[_GROUP]) / _SHARED), 0, "(shared servers)")
        _write(_used_s(Path(os.environ[_GROUP])), 0, "(all together)")


def _enter(group: Path, pid: int) -> None:
    group.mkdir(exist_ok=True)
    (group / "cgroup.procs").write_text(str(pid))


def _used_s(group: Path) -> float:
    if not group.is_dir():
        return 0.0
    if group.is_relative_to(_V1):
        return int((group / "cpuacct.usage").read_text()) / 1e9
    return int((group / "cpu.stat").read_text().split()[1]) / 1e6


def _write(cpu_s: float, wall_s: float, what: str) -> None:
    with Path(os.environ[FILE]).open("a") as file:
        file.write(f"{cpu_s:.3f}\t{wall_s:.3f}\t{what}\n")
