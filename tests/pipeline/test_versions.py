"""Which connectors belong to which Spark."""

from __future__ import annotations

import pytest

from harvester.errors import ExitCode
from harvester.pipeline.errors import ConnectorMismatch
from harvester.pipeline.session import check_connectors, connectors


@pytest.mark.parametrize(
    ("pyspark", "kafka", "delta"),
    [
        ("4.0.0", "spark-sql-kafka-0-10_2.13:4.0.0", "delta-spark_2.13:4.0.0"),
        ("4.0.1", "spark-sql-kafka-0-10_2.13:4.0.1", "delta-spark_2.13:4.0.0"),
        ("4.1.0.dev3", "spark-sql-kafka-0-10_2.13:4.1.0", "delta-spark_4.1_2.13:4.1.0"),
    ],
)
def test_coordinates_follow_the_installed_spark(pyspark: str, kafka: str, delta: str) -> None:
    assert [str(one) for one in connectors(pyspark)] == [
        f"org.apache.spark:{kafka}",
        f"io.delta:{delta}",
        "org.postgresql:postgresql:42.7.8",
    ]


@pytest.mark.parametrize("version", ["3.5.1", "5.0.0", "four"])
def test_a_spark_that_nothing_is_known_for(version: str) -> None:
    with pytest.raises(ConnectorMismatch, match=version) as caught:
        connectors(version)
    assert caught.value.exit_code is ExitCode.CONNECTOR


@pytest.mark.parametrize(
    "jar",
    [
        "/opt/jars/spark-sql-kafka-0-10_2.13-4.0.1.jar",
        "org.apache.spark:spark-sql-kafka-0-10_2.12:4.0.0",
        "/opt/jars/spark-avro_2.12-4.0.0.jar",
        "io.delta:delta-spark_2.13:3.3.2",
        "delta-spark_4.1_2.13-4.1.0.jar",
        "delta-spark_2.12-4.0.0.jar",
    ],
)
def test_a_connector_of_another_spark_is_named(jar: str) -> None:
    with pytest.raises(ConnectorMismatch, match=r"was not built for PySpark 4\.0\.0") as caught:
        check_connectors("4.0.0", ["postgresql-42.7.8.jar", jar])
    assert jar.rsplit("/", 1)[-1] in caught.value.message
    assert ":4.0.0" in (caught.value.hint or "")


def test_connectors_that_fit_and_jars_of_others_pass() -> None:
    check_connectors("4.0.0", [*map(str, connectors("4.0.0")), "delta-spark_4.0_2.13-4.2.0.jar", "mine-1.0.jar"])
    check_connectors("4.1.2", map(str, connectors("4.1.2")))
