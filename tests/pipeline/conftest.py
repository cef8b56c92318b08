"""One Spark for each worker, started by the first test that asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from harvester.pipeline.errors import SparkUnavailable
from harvester.pipeline.session import AVRO, DELTA, FORMAT, ICEBERG, SessionSettings, session, use_java
from tests.support.drains import slice_drain
from tests.support.object_store import bucket, s3a_jars
from tests.support.spark_cluster import cluster
from tests.support.sparks import INTERPRETED, LASTING, SMALL, compiled, configure, names_remembered

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


__all__ = ["bucket", "cluster", "compiled_queries", "slice_drain", "spark"]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A Spark that nothing is compiled of yet, on a slow machine and beside other tests, takes its time."""
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.timeout(1800))


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """A running Spark with the connectors, which interprets queries; skips where there is no Java that it runs on."""
    try:
        use_java()
    except SparkUnavailable as error:
        pytest.skip(error.message)
    jars = {"spark.jars": ",".join(map(str, s3a_jars()))}
    conf = {**SMALL, **LASTING, **INTERPRETED, **jars, FORMAT: ICEBERG, AVRO: "true"}  # whose connector there is then
    with names_remembered(), session(SessionSettings("tests", "local[2]", conf)) as running:
        configure(running, {FORMAT: DELTA})
        yield running


@pytest.fixture
def compiled_queries(spark: SparkSession) -> Iterator[None]:
    """Queries are compiled, and planned anew while they run, as in production."""
    with compiled(spark):
        yield
