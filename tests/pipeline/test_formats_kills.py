"""The job `lake` on Iceberg as a process that is killed again and again while records keep coming."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.pipeline.test_lake_kills import Stream, assert_whole
from tests.support.drivers import START_S, Driver
from tests.support.formats import LakeAt, known, where
from tests.support.harvested import KEPT, Writer
from tests.support.hooks import Plan
from tests.support.longs import long

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.conftest import MakeTopic
    from tests.support.servers import Servers

pytestmark = long

PLACES = ("lake.silver", "lake.publish", "lake.ids", "lake.end", "lake.current", "lake.folded")


@pytest.mark.parametrize("kind", ["iceberg directory", "iceberg schema"])
def test_killed_at_any_point_nothing_is_lost_or_doubled(
    spark: SparkSession, servers: Servers, database: str, make_topic: MakeTopic, tmp_path: Path, kind: str
) -> None:
    """Held right before a write, then killed; once Python alone, so that Spark is left to end by itself."""
    place, topic = where(kind, tmp_path, database), make_topic(4, KEPT)
    stream, plan = Stream(Writer(servers.bootstrap), topic), Plan(tmp_path / "plan")
    args = (
        "--topic", topic, "--to", place.address, "--format", place.format, "--set", "leader_group_id=test",
        "--bootstrap", servers.bootstrap, "--checkpoint", str(tmp_path / "checkpoint"),
    )  # fmt: skip
    flowing = (*args, "--every", "0s", "--fold-every", "0s")
    stream.more()
    with known(spark, place):
        with stream.flowing():
            for here in PLACES:
                with plan.blocked(here), Driver("lake", *flowing, conf=place.conf, env=plan.env) as driver:
                    driver.wait_held(plan, here, START_S)
                    driver.kill()
            with Driver("lake", *flowing, conf=place.conf) as driver:
                driver.wait_for_line(r"batch \d+: ", START_S)
                driver.kill(java=False)
        with Driver("lake", *args, "--once", "--compact-every", "1", conf=place.conf) as driver:
            assert driver.wait(START_S) == 0, driver.output
        assert_whole(LakeAt(spark, tmp_path, servers.bootstrap, place), stream)
