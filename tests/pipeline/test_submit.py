"""A job that spark-submit starts, as docs/pipeline.md has it: with the master and the settings that it was given."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from harvester.pipeline.session import connector_jars, spark_version, use_java
from tests.support.cli import cli_environment
from tests.support.harvested import KEPT, Sent, Writer
from tests.support.lakes import Lake
from tests.support.longs import long
from tests.support.sparks import SMALL, arguments

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.conftest import MakeTopic
    from tests.support.servers import Servers

ROOT = Path(__file__).parents[2]
# Two lines as in the manual, and what Spark runs with is told before it ends.
JOB = """
import json

from pyspark.sql import SparkSession

from harvester_cli.main import main

stop = SparkSession.stop


def told(spark):
    print("with", json.dumps({**dict(spark.sparkContext.getConf().getAll()), "master": spark.sparkContext.master}))
    stop(spark)


SparkSession.stop = told
main()
"""


@long  # test_session has what becomes of settings; only this one submits
def test_a_submitted_lake_has_the_master_and_the_settings_that_were_submitted(
    spark: SparkSession, servers: Servers, make_topic: MakeTopic, tmp_path: Path
) -> None:
    use_java()
    topic, lake = make_topic(1, KEPT), Lake(spark, tmp_path / "lake", servers.bootstrap)
    Writer(servers.bootstrap).send(topic, [Sent(number, b"a") for number in range(3)])
    job = tmp_path / "lake.py"
    job.write_text(JOB)
    theirs = {
        "spark.sql.extensions": "org.example.Theirs",
        "spark.sql.adaptive.enabled": "false",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        "spark.databricks.delta.snapshotPartitions": "3",
    }
    jars = ",".join(map(str, connector_jars(spark_version())))
    done = subprocess.run(
        [
            str(Path(sys.executable).with_name("spark-submit")), "--master", "local[1]", "--jars", jars,
            *arguments({**SMALL, **theirs}),
            str(job), "pipeline", "lake", "--topic", topic, "--to", str(lake.root),
            "--bootstrap", servers.bootstrap, "--set", "leader_group_id=test", "--once",
        ],
        cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
        env=cli_environment({"PYTHONPATH": f"{ROOT}:{ROOT / 'cli'}", "PYSPARK_PYTHON": sys.executable}),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = next(line for line in done.stdout.splitlines() if line.startswith("with "))
    found = json.loads(told.removeprefix("with "))
    assert found["master"] == "local[1]"
    extensions = found.pop("spark.sql.extensions")
    assert extensions == f"{theirs.pop('spark.sql.extensions')},io.delta.sql.DeltaSparkSessionExtension"
    assert found.items() >= theirs.items()
    assert sorted(row["id"] for row in lake.rows("silver", "id")) == [0, 1, 2]
