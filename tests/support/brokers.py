"""A cluster of three brokers of a test's own, which can be killed and started one by one.

Broker 1 is also the only controller, so 2 and 3 may go. What clients are told of broker 1's address is for the test to
say: that of a proxy, which is then never gone around.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from harvester.stack import java
from harvester.stack import kafka as stack_kafka
from harvester.stack.java import broker_jars
from harvester.stack.processes import ProcessId
from harvester.stack.stack import free_ports

from .class_data import prepared
from .servers import in_memory

_START_S = 90.0
# At its end it kills what it was told of, however the test ended.
_REAPER = 'while read pid; do pids="$pids $pid"; done; kill -9 $pids 2>/dev/null'


@contextmanager
def another_listener(
    name: str, port: int, protocol: str, settings: Mapping[str, str], whole: Mapping[str, str] | None = None
) -> Iterator[None]:
    """Brokers that are started meanwhile have one more, with these settings; `whole`: and the broker has these."""
    original = stack_kafka.properties
    added = {
        "listeners": f"{name}://127.0.0.1:{port}",
        "advertised.listeners": f"{name}://127.0.0.1:{port}",
        "listener.security.protocol.map": f"{name}:{protocol}",
    }

    def properties(**given: Any) -> dict[str, str]:
        found = original(**given)
        own = {f"listener.name.{name.lower()}.{setting}": value for setting, value in settings.items()}
        return {**found, **{each: f"{found[each]},{value}" for each, value in added.items()}, **own, **(whole or {})}

    with prepared(), mock.patch.object(stack_kafka, "properties", properties):
        yield


class Brokers:
    """Three of them, running. `advertised` is where clients find broker 1; `bootstrap` goes there past it."""

    def __init__(self, directory: Path, port: int, advertised: int, reaper: subprocess.Popen[bytes]) -> None:
        self._directory, self._reaper = directory, reaper
        self._cluster = stack_kafka.new_cluster()
        self._controller, *ports = free_ports(6, [])
        self._client_ports = {1: port, 2: ports[0], 3: ports[1]}
        self._inner_ports = dict(zip((1, 2, 3), ports[2:], strict=True))
        self._advertised = {**self._client_ports, 1: advertised}
        self._processes: dict[int, ProcessId] = {}
        self.bootstrap = f"127.0.0.1:{port}"
        for number in (1, 2, 3):
            self._launch(number)
        for number in (1, 2, 3):
            self._wait(number)

    def start(self, number: int) -> None:
        """Start a broker again, at the address it had."""
        self._launch(number)
        self._wait(number)

    def kill(self, number: int) -> None:
        """SIGKILL."""
        stack_kafka.halt(self._processes.pop(number), kill=True)

    def kill_all(self) -> None:
        """The end of the cluster."""
        for number in list(self._processes):
            self.kill(number)

    def _launch(self, number: int) -> None:
        port, inner = self._client_ports[number], self._inner_ports[number]
        listeners = [f"PLAINTEXT://127.0.0.1:{port}", f"INNER://127.0.0.1:{inner}"]
        advertised = [f"PLAINTEXT://127.0.0.1:{self._advertised[number]}", f"INNER://127.0.0.1:{inner}"]
        if number == 1:
            listeners.append(f"CONTROLLER://127.0.0.1:{self._controller}")
        original = stack_kafka.properties
        replaced = {
            "node.id": str(number),
            "process.roles": "broker,controller" if number == 1 else "broker",
            "listeners": ",".join(listeners),
            "advertised.listeners": ",".join(advertised),
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,INNER:PLAINTEXT,CONTROLLER:PLAINTEXT",
            "inter.broker.listener.name": "INNER",
            "min.insync.replicas": "2",
            "replica.lag.time.max.ms": "2000",
        }
        with (
            prepared(),
            mock.patch.object(stack_kafka, "properties", lambda **given: {**original(**given), **replaced}),
            mock.patch.object(stack_kafka, "new_cluster", return_value=self._cluster),
        ):
            process = stack_kafka.launch(
                self._directory / f"broker-{number}",
                broker_jars(),
                java.find(),
                port=port,
                controller_port=self._controller,
                heap_mb=300,
                durable=False,
            )
        self._processes[number] = process
        assert self._reaper.stdin is not None
        self._reaper.stdin.write(f"{process.pid}\n".encode())
        self._reaper.stdin.flush()

    def _wait(self, number: int) -> None:
        home = self._directory / f"broker-{number}"
        deadline = time.monotonic() + _START_S
        stack_kafka.wait_ready(self._processes[number], home, self._client_ports[number], deadline)


@contextmanager
def three_brokers(port: int, advertised: int) -> Iterator[Brokers]:
    """Broker 1 listens on `port`, and tells its clients to come to `advertised`."""
    directory = Path(tempfile.mkdtemp(prefix="harvester-brokers-", dir=in_memory()))
    reaper = subprocess.Popen(["sh", "-c", _REAPER], stdin=subprocess.PIPE, start_new_session=True)
    try:
        brokers = Brokers(directory, port, advertised, reaper)
        yield brokers
        brokers.kill_all()
    finally:
        reaper.communicate()
        shutil.rmtree(directory, ignore_errors=True)
