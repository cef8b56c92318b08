"""Jobs on a Spark cluster of separate processes, parts of which are killed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tests.pipeline.test_lake_kills import Stream, assert_whole
from tests.support import spark_cluster
from tests.support.drains import ONE_BY_ONE, RECORDS, assert_held
from tests.support.drivers import START_S, Driver
from tests.support.harvested import KEPT, Writer
from tests.support.hooks import Plan
from tests.support.lakes import Lake
from tests.support.longs import long
from tests.support.wait import eventually

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from scripts.cluster.cluster import Cluster
    from tests.conftest import MakeTopic
    from tests.support.drains import SliceDrain
    from tests.support.servers import Servers

pytestmark = long


def test_the_lake_survives_its_workers_and_its_driver(
    cluster: Cluster, spark: SparkSession, servers: Servers, make_topic: MakeTopic, tmp_path: Path
) -> None:
    """One worker dies with its executor in a batch and later comes back; the driver dies in another."""
    lake, topic = Lake(spark, tmp_path / "lake", servers.bootstrap), make_topic(4, KEPT)
    stream = Stream(Writer(servers.bootstrap), topic)
    plan = Plan(tmp_path / "plan")
    args = ("--topic", topic, "--to", str(lake.root), "--bootstrap", servers.bootstrap, "--set", "leader_group_id=test")
    stream.more(200)

    def driver(*more: str) -> Driver:
        return Driver("lake", *args, *more, master=cluster.master_url, conf=spark_cluster.CONF, env=plan.env)

    with stream.flowing(), driver("--every", "0s") as first:
        with plan.blocked("lake.silver"):
            first.wait_held(plan, "lake.silver", START_S)
            assert len(cluster.executors()) == 2
            assert len(cluster.workers[0].kill()) == 2
        first.wait_for_line(r"batch 0: ", START_S)
        cluster.restart_worker(0)
        eventually(lambda: len(cluster.executors()) == 2, START_S, "an executor on the worker that came back")
        with plan.blocked("lake.ids"):
            first.wait_held(plan, "lake.ids", START_S)
            cluster.workers[1].kill()
            first.kill()
    cluster.restart_worker(1)
    eventually(lambda: not cluster.executors(), START_S, "the end of the killed driver's executors")
    with driver("--once") as second:
        assert second.wait(START_S) == 0, second.output
    assert_whole(lake, stream)


def test_the_drain_survives_a_worker_and_its_driver(cluster: Cluster, slice_drain: SliceDrain) -> None:
    """One worker dies with its executor while a slice is sent, and the driver later, in the same slice."""

    def driver(*more: str) -> Driver:
        return slice_drain.start(*more, master=cluster.master_url, conf=spark_cluster.CONF)

    with driver("--lease=20s", *ONE_BY_ONE) as first:
        slice_drain.await_sent(first, 100)
        assert len(cluster.executors()) == 2
        assert len(cluster.workers[0].kill()) == 2
        slice_drain.await_sent(first, slice_drain.sent() + 100)
        first.kill()
    assert slice_drain.left() == RECORDS, first.output
    cluster.restart_worker(0)
    eventually(lambda: not cluster.executors(), START_S, "the end of the killed driver's executors")
    with driver("--lease=10s") as second:
        assert second.wait(START_S) == 0, second.output

    assert slice_drain.left() == 0
    assert_held(slice_drain.judged(), attempts=3)
