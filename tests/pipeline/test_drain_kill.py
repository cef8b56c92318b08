"""A drain whose processes are killed in the middle of a slice: nothing is lost, first deliveries keep their order."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from confluent_kafka import Consumer, TopicPartition

from harvester.config import Config
from harvester.outbox.tables import OutboxTable
from harvester.pipeline.drain import job as drain
from harvester.verify.check import verify
from harvester.verify.load import Load
from harvester.verify.pump import pump
from harvester.verify.verdict import Kind, Verdict
from tests.support.cli import RunningCli
from tests.support.sparks import SMALL
from tests.support.wait import eventually

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.support.servers import Servers

pytestmark = [pytest.mark.servers, pytest.mark.timeout(600)]

TABLE = OutboxTable.parse("outbox")
START_S = 300.0  # Spark, and a first slice, beside whatever else the machine is doing
RECORDS = 1_500  # one slice
LIMITS = {"heartbeat_timeout": "2s", "session_timeout": "6s", "drain_interval": "3s"}


class Driver:
    """`harvester pipeline drain` in a session of its own, with every record in a request of its own."""

    def __init__(self, servers: Servers, dsn: str, topic: str, group: str, *more: str) -> None:
        self.servers, self.dsn, self.topic, self.group = servers, dsn, topic, group
        self._more = more
        self._consumer = Consumer(
            {"bootstrap.servers": servers.bootstrap, "group.id": "test-reader", "broker.address.family": "v4"}
        )

    def start(self, *more: str) -> RunningCli:
        limits = [f"--set=limits.{name}={value}" for name, value in LIMITS.items()]
        return RunningCli(
            "pipeline", "drain", f"--bootstrap={self.servers.bootstrap}", f"--set=data_source={self.dsn}",
            f"--set=leader_group_id={self.group}", *limits, *(f"--conf={k}={v}" for k, v in SMALL.items()), *more,
            session=True,
        )  # fmt: skip

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
            "limits": LIMITS,
        }
        return Config(**settings)

    def judged(self) -> Verdict:
        return verify(self.dsn, TABLE, {"bootstrap.servers": self.servers.bootstrap}).verdict


@pytest.fixture
def driver(servers: Servers, database: str, topic: str, group: str) -> Any:
    pump(database, TABLE, Load(records=RECORDS, topics=(topic,), keys=50, rows_per_transaction=20))
    made = Driver(servers, database, topic, group)
    yield made
    made._consumer.close()


def holds(verdict: Verdict) -> None:
    """I1 and the first half of I2, and no more repeats than the slice that was in progress."""
    assert (verdict.delivered, verdict.lost, verdict.pending, verdict.unexpected) == (RECORDS, 0, 0, 0)
    assert not [finding for finding in verdict.findings if finding.kind is Kind.LATE]
    assert 0 < verdict.duplicates <= RECORDS


def test_a_killed_driver_is_followed_by_one_that_waits_for_its_lease(driver: Driver, spark: SparkSession) -> None:
    one_by_one = ("--kafka=batch.size=1", "--kafka=max.in.flight.requests.per.connection=1")
    with driver.start("--master=local[2]", "--lease=10s", *one_by_one) as running:
        eventually(lambda: driver.sent() >= 100 or running.process.poll() is not None, START_S, "the first records")
        os.killpg(running.pid, signal.SIGKILL)  # Python and Java
        running.wait()
    assert 100 <= driver.sent() < RECORDS, running.output
    assert driver.left() == RECORDS

    said: list[str] = []
    settings = drain.DrainSettings(
        driver.config(), {"bootstrap.servers": driver.servers.bootstrap}, timedelta(seconds=30)
    )
    report = drain.run(spark, settings, waiting=said.append)

    assert report.records == RECORDS
    assert any("has the term" in line for line in said), said
    holds(driver.judged())


def test_killed_executors_are_replaced_and_the_task_starts_over(driver: Driver) -> None:
    one_by_one = ("--kafka=batch.size=1", "--kafka=max.in.flight.requests.per.connection=1")
    with driver.start("--master=local-cluster[2,1,1024]", "--lease=60s", *one_by_one) as running:
        word = b"CoarseGrainedExecutorBackend"
        executors = eventually(lambda: (e := descendants(running.pid, word))[1:] and e, START_S, "both executors")
        eventually(lambda: driver.sent() >= 100 or running.process.poll() is not None, START_S, "the first records")
        # All of them, since which one runs the task is Spark's choice; to look for them only now would take too long.
        for executor in executors:
            os.kill(executor, signal.SIGKILL)
        assert driver.sent() < RECORDS
        assert driver.left() == RECORDS
        assert running.wait(START_S) == 0, running.output
    holds(driver.judged())


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
