"""Asking a group's coordinator that cannot be reached."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from harvester.clock import clock_s
from harvester.neli import member
from tests.support.wait import eventually

NOBODY = {"bootstrap.servers": "127.0.0.1:9", "reconnect.backoff.max.ms": "100"}


def clients() -> set[str]:
    """The main threads of Kafka clients in this process."""
    found = set[str]()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            if "rdk:main" in (task / "comm").read_text():
                found.add(task.name)
    return found


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
def test_no_client_is_left_that_still_waits_for_the_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    """librdkafka aborts the process when the coordinator appears after a request for it has timed out."""
    monkeypatch.setattr(member, "_WITHIN_S", 0.5)
    before = clients()
    member.await_dead("group", NOBODY, clock_s() + 60, threading.Event(), lambda level, text: None)
    eventually(lambda: clients() <= before, what="the end of the client")
    began = clock_s()
    member.await_stable("group", NOBODY, lambda wait_s: threading.Event().wait(wait_s))
    assert clock_s() - began >= 0.4
    eventually(lambda: clients() <= before, what="the end of the client")
