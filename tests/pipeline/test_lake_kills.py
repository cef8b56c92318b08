"""The job `lake` as a process that is killed again and again while records keep coming."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.drivers import START_S, Driver
from tests.support.harvested import KEPT, Sent, Writer
from tests.support.hooks import Plan
from tests.support.lakes import Lake, assert_same
from tests.support.longs import long
from tests.support.object_store import s3a_jars

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.conftest import MakeTopic
    from tests.support.object_store import Bucket
    from tests.support.servers import Servers

pytestmark = long

PLACES = ("lake.silver", "lake.ids", "lake.end", "lake.current", "lake.folded")
KEYS = 7


class Stream:
    """Records that keep coming: ids from 1 on, every third of them sent a second time."""

    def __init__(self, writer: Writer, topic: str) -> None:
        self.ids, self.sent = 0, 0
        self._writer, self._topic = writer, topic

    def more(self, count: int = 20) -> None:
        """So many ids more."""
        fresh = [Sent(number, b"k-%d" % (number % KEYS)) for number in range(self.ids + 1, self.ids + count + 1)]
        batch = [*fresh, *(one.again() for one in fresh if one.id % 3 == 0)]
        self.sent += len(self._writer.send(self._topic, batch))
        self.ids += count

    @contextmanager
    def flowing(self) -> Iterator[None]:
        """More come all the time."""
        ended = threading.Event()

        def flow() -> None:
            while not ended.wait(0.1):
                self.more()

        thread = threading.Thread(target=flow, name="records")
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def assert_whole(lake: Lake, stream: Stream) -> None:
    """Every record is in bronze once, every id in silver once, and each key has the state of its highest id."""
    places = [tuple(row) for row in lake.rows("bronze", "partition", "offset")]
    assert len(places) == stream.sent
    assert len(set(places)) == stream.sent
    assert_same(range(1, stream.ids + 1), (row["id"] for row in lake.rows("silver", "id")))
    last = {number % KEYS: number for number in range(1, stream.ids + 1)}
    assert_same(last.values(), (row["id"] for row in lake.rows("current", "id")))


@pytest.mark.parametrize("is_remote", [False, True])
def test_killed_at_any_point_nothing_is_lost_or_doubled(
    spark: SparkSession, servers: Servers, make_topic: MakeTopic, tmp_path: Path, bucket: Bucket, is_remote: bool
) -> None:
    """Held right before a write, then killed; once Python alone, so that Spark is left to end by itself."""
    lake = Lake(spark, tmp_path / "lake", servers.bootstrap, bucket.url("lake") if is_remote else None)
    topic = make_topic(4, KEPT)
    stream = Stream(Writer(servers.bootstrap), topic)
    plan = Plan(tmp_path / "plan")
    args = ("--topic", topic, "--to", lake.address, "--bootstrap", servers.bootstrap, "--set", "leader_group_id=test")
    flowing = (*args, "--every", "0s", "--fold-every", "0s")
    conf = {**bucket.conf, "spark.jars": ",".join(map(str, s3a_jars()))} if is_remote else {}
    stream.more()
    with stream.flowing():
        for place in PLACES:
            with plan.blocked(place), Driver("lake", *flowing, conf=conf, env=plan.env) as driver:
                driver.wait_held(plan, place, START_S)
                driver.kill()
        with Driver("lake", *flowing, conf=conf) as driver:
            driver.wait_for_line(r"batch \d+: ", START_S)
            driver.kill(java=False)
    with Driver("lake", *args, "--once", "--compact-every", "1", conf=conf) as driver:
        assert driver.wait(START_S) == 0, driver.output
    assert_whole(lake, stream)
