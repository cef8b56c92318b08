"""A drain of one slice as a process that can be killed, and what must hold of it then."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from confluent_kafka import Consumer, TopicPartition

from harvester.config import Config
from harvester.outbox.tables import OutboxTable
from harvester.verify.check import verify
from harvester.verify.load import Load
from harvester.verify.pump import pump
from harvester.verify.verdict import Kind, Verdict

from .drivers import START_S, Driver
from .wait import eventually

if TYPE_CHECKING:
    from .servers import Servers

RECORDS = 1_500  # one slice
ONE_BY_ONE = ("--kafka=batch.size=1", "--kafka=max.in.flight.requests.per.connection=1")
"""Every record in a request of its own, so that there is time to kill something."""

_TABLE = OutboxTable.parse("outbox")
_LIMITS = {"heartbeat_timeout": "2s", "session_timeout": "6s", "drain_interval": "3s"}


class SliceDrain:
    """`harvester pipeline drain` on an outbox of its own."""

    def __init__(self, servers: Servers, dsn: str, topic: str, group: str) -> None:
        self.servers, self.dsn, self.topic, self.group = servers, dsn, topic, group
        self._consumer = Consumer(
            {"bootstrap.servers": servers.bootstrap, "group.id": "test-reader", "broker.address.family": "v4"}
        )

    def start(self, *more: str, master: str = "local[2]", conf: Mapping[str, str] | None = None) -> Driver:
        limits = [f"--set=limits.{name}={value}" for name, value in _LIMITS.items()]
        return Driver(
            "drain", f"--bootstrap={self.servers.bootstrap}", f"--set=data_source={self.dsn}",
            f"--set=leader_group_id={self.group}", *limits, *more, master=master, conf=conf,
        )  # fmt: skip

    def await_sent(self, running: Driver, records: int) -> None:
        """Until so many records stand in the topic; at once when the job has ended before."""
        eventually(lambda: self.sent() >= records or running.process.poll() is not None, START_S, f"{records} records")
        assert running.process.poll() is None, running.output

    def sent(self) -> int:
        """How many records stand in the topic."""
        places = (TopicPartition(self.topic, number) for number in range(4))
        return sum(self._consumer.get_watermark_offsets(place, 10)[1] for place in places)

    def left(self) -> int:
        with psycopg.connect(self.dsn) as connection:
            row = connection.execute("SELECT count(*) FROM outbox").fetchone()
        assert row is not None
        return int(row[0])

    def config(self) -> Config:
        settings: dict[str, Any] = {
            "base_kafka_config": {"bootstrap.servers": self.servers.bootstrap, "broker.address.family": "v4"},
            "leader_group_id": self.group,
            "data_source": self.dsn,
            "limits": _LIMITS,
        }
        return Config(**settings)

    def close(self) -> None:
        """Ends nothing that was started."""
        self._consumer.close()

    def judged(self) -> Verdict:
        return verify(self.dsn, _TABLE, {"bootstrap.servers": self.servers.bootstrap}).verdict


@pytest.fixture
def slice_drain(servers: Servers, database: str, topic: str, group: str) -> Iterator[SliceDrain]:
    """An outbox with `RECORDS` rows, and how to drain it."""
    pump(database, _TABLE, Load(records=RECORDS, topics=(topic,), keys=50, rows_per_transaction=20))
    made = SliceDrain(servers, database, topic, group)
    yield made
    made.close()


def assert_held(verdict: Verdict, *, attempts: int = 2) -> None:
    """I1 and the first half of I2, and no more repeats than a slice that took so many attempts."""
    assert (verdict.delivered, verdict.lost, verdict.pending, verdict.unexpected) == (RECORDS, 0, 0, 0)
    assert not [finding for finding in verdict.findings if finding.kind is Kind.LATE]
    assert 0 < verdict.duplicates <= RECORDS * (attempts - 1)
