"""Members of a leader group without a relay behind them, and one that can be killed."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import cast

from harvester.clock import clock_s
from harvester.config import Config
from harvester.neli.group import GroupListener, Identity
from harvester.neli.member import KafkaGroup
from harvester.outbox.leader_session import MarkSession
from harvester.outbox.tables import OutboxTable
from harvester.wiring import member_settings

from .wait import eventually

OUTBOX = Identity("member", "outbox-1", "billing.outbox")


class Member:
    """A member and what it was told."""

    def __init__(self, config: Config, identity: Identity = OUTBOX) -> None:
        self.identity = identity
        self.said: list[str] = []
        self.lines: list[str] = []  # of its log
        self.trusted_until = 0.0
        self.failure: BaseException | None = None
        self.troubles: list[str | None] = []  # each that was another one than the last
        self.marker_alive = True
        self.revoke_handled = threading.Event()
        self.revoke_handled.set()
        self.group = KafkaGroup(member_settings(config))

    def start(self) -> None:
        self.group.start(
            self.identity,
            cast(
                GroupListener,
                SimpleNamespace(
                    acquired=lambda: self.said.append("acquired"),
                    fenced=lambda reason: self.said.append(f"fenced: {reason}"),
                    revoking=self._revoking,
                    trust=self._trust,
                    fail=self._failed,
                    trouble=self._trouble,
                    marker_alive=lambda: self.marker_alive,
                    client_said=lambda level, text: self.lines.append(text),
                ),
            ),
        )

    def wait_said(self, *expected: str) -> None:
        """Until it was told exactly this; an entry stands for all that begin like it."""

        def matches() -> bool:
            said = list(self.said)
            return len(said) == len(expected) and all(map(str.startswith, said, expected))

        try:
            eventually(matches, what=f"{expected}")
        except AssertionError as error:
            raise AssertionError(f"{error}; was told {self.said}, trouble {self.trouble}") from None

    def wait_joined(self) -> None:
        """Until the group has let it in."""
        eventually(lambda: any(line.startswith("joined group") for line in list(self.lines)), what="a place")

    @property
    def is_trusted(self) -> bool:
        return clock_s() < self.trusted_until

    def _trust(self, until: float) -> None:
        self.trusted_until = until

    def _revoking(self, within_s: float) -> None:
        self.said.append("revoking")
        assert self.revoke_handled.wait(min(30.0, within_s))
        self.trusted_until = 0.0

    def _failed(self, error: BaseException) -> None:
        self.failure = error

    @property
    def trouble(self) -> str | None:
        return self.troubles[-1] if self.troubles else None

    def _trouble(self, text: str | None, _level: int = 0) -> None:
        if text != self.trouble:
            self.troubles.append(text)


_MORTAL = """
import json, sys
from confluent_kafka import Consumer
options, topic = json.loads(sys.argv[1]), sys.argv[2]
consumer = Consumer(options)
consumer.subscribe([topic], on_assign=lambda consumer, partitions: print("joined", flush=True))
while True:
    consumer.poll(0.1)
"""


class Mortal:
    """A standby in a process of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def wait_joined(self) -> None:
        """Until the group has let it in."""
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "joined\n"

    def kill(self) -> None:
        """SIGKILL: the group hears of it when its session has run out."""
        self._process.kill()
        self._process.wait()


def identity_of(dsn: str) -> Identity:
    """Of a member that serves the outbox of this database."""
    session = MarkSession(dsn, OutboxTable.parse("outbox"), "test", 5.0)
    try:
        return Identity("member", session.identity(), "outbox")
    finally:
        session.close()


@contextmanager
def mortal(config: Config) -> Iterator[Mortal]:
    """Start one that wants into the leader's group; killed at the end."""
    command = [sys.executable, "-c", _MORTAL, json.dumps(config.consumer_options()), config.leader_topic]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        made = Mortal(process)
        try:
            yield made
        finally:
            made.kill()
