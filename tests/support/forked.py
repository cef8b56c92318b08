"""What processes of a fork server run in tests; each says what it has found in one line of JSON on its pipe."""

from __future__ import annotations

import json
import os
import random
import select
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

from harvester.clock import clock_s
from harvester.relay.ipc import MessagePipe, in_flight, trust_check


def report(variable: str, _inbound: int, outbound: int, shared: Any, _supervisor: int, _memory: int) -> int:
    """What this process looks like from inside; exits with 7."""
    own = Path("/proc/self")
    found = {
        "threads": len(list((own / "task").iterdir())),
        "sockets": sum(link.startswith("socket:") for link in _links()),
        "files": [link for link in _links() if link.startswith("/") and not link.startswith(("/proc", "/dev/null"))],
        "variable": os.environ.get(variable),
        "directory": str(Path.cwd()),
        "path": sys.path,
        "main": getattr(sys.modules["__main__"], "__file__", None),
        "clients": sorted({"confluent_kafka", "psycopg"} & set(sys.modules)),
        "random": random.random(),
        "shared": list(shared),
        "command": (own / "cmdline").read_text(),
        "name": (own / "comm").read_text().strip(),
    }
    os.write(outbound, json.dumps(found).encode())
    return 7


def fails(_spec: Any, _inbound: int, _outbound: int, _shared: Any, _supervisor: int, _memory: int) -> int:
    """Ends by an error."""
    raise RuntimeError("as it is told")


def wait_for_supervisor(_spec: Any, _inbound: int, _outbound: int, _shared: Any, supervisor: int, _memory: int) -> int:
    """Lives as long as its supervisor."""
    poller = select.poll()
    poller.register(supervisor, select.POLLIN)
    poller.poll()
    return 0


def leads(trusted_s: Any, _inbound: int, outbound: int, _shared: Any, supervisor: int, _memory: int) -> int:
    """An elector that leads, says four times a second that it turns, and hears nothing."""
    pipe = MessagePipe(outbound)
    pipe.send(("state", (None, 0.0, 3)))
    pipe.send(("trust", (clock_s() + (trusted_s if isinstance(trusted_s, float) else 600.0),)))
    pipe.send(("acquired", (3,)))
    while not select.select([supervisor], [], [], 0.25)[0]:
        if not isinstance(trusted_s, float):
            pipe.send(("turns", ()))
    return 7


def falls_silent(_spec: Any, *place: Any) -> int:
    """An elector that leads, is trusted for half a second, and says nothing more."""
    return leads(0.5, *place)


def dies(*_: Any) -> int:
    """Ends at once."""
    return 9


def deaf(_spec: Any, frames: int, answers: int, _shared: Any, _supervisor: int, _memory: int) -> NoReturn:
    """A shard that has closed its pipes and lives on."""
    os.close(frames)
    os.close(answers)
    while True:
        signal.pause()


def asks(seconds: float, _frames: int, _answers: int, shared: Any, _supervisor: int, _memory: int) -> NoReturn:
    """A shard that does nothing but look at what is shared, and is killed wherever it is after so much of its time."""
    trusted = trust_check(shared)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    while True:
        trusted()
        in_flight(shared)


def supervise() -> NoReturn:
    """The main program of a supervisor with one process, and with a fork of its own that keeps all pipes open.

    It prints the pids of both, and lives until it is killed.
    """
    from harvester.relay.forkserver import Forkserver
    from tests.support.wait import eventually

    forkserver = Forkserver()
    eventually(forkserver.is_up, what="the server")
    process = forkserver.start(wait_for_supervisor, None, "waits")
    assert process is not None
    fork = os.fork()
    if fork:
        print(process.pid, fork, flush=True)
    while True:
        select.select([], [], [])


def _links() -> list[str]:
    links = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            links.append(str(entry.readlink()))
        except OSError:  # the listing's own
            continue
    return links
