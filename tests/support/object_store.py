"""An object store for Spark: S3 as moto speaks it, in this process, and the connector that docs/pipeline.md names."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harvester.pipeline.session import OF_SPARK, Coordinate, resolve
from harvester.stack import java

from .large_values import moto

CONNECTOR = (
    Coordinate("org.apache.hadoop", "hadoop-aws", "3.4.1"),
    Coordinate("software.amazon.awssdk", "s3-transfer-manager", "2.25.53"),
    Coordinate("software.amazon.awssdk", "sts", "2.25.53"),
)
# A jar of 500 MB with all of the SDK. Of Netty, Spark has all that is needed.
WITHOUT = ("software.amazon.awssdk:bundle", "io.netty", *(one for one in OF_SPARK if one != "org.apache.hadoop"))


def s3a_jars() -> list[Path]:
    """Hadoop's connector for S3 and what it needs; downloads them (11 MB) the first time."""
    name = "-".join(("s3a", *(one.version for one in CONNECTOR)))
    return sorted(java.cached_jars(name, lambda directory: resolve(CONNECTOR, directory, WITHOUT)).glob("*.jar"))


class Bucket:
    """A bucket of a server of its own. `conf`: what Spark needs to know of it."""

    def __init__(self, url: str) -> None:
        self.name = f"lakes-{uuid.uuid4().hex[:8]}"
        options = {
            "endpoint": url, "endpoint.region": "us-east-1", "path.style.access": "true",
            "access.key": "tests", "secret.key": "tests", "attempts.maximum": "1", "retry.limit": "2",
        }  # fmt: skip
        self.conf = {f"spark.hadoop.fs.s3a.{name}": value for name, value in options.items()}
        self.refused: Callable[[dict[str, Any]], bool] = lambda _: False
        """Tells whether the server forbids a request (of WSGI); at first it forbids none."""

    def url(self, name: str) -> str:
        return f"s3a://{self.name}/{name}"


@pytest.fixture
def bucket(spark: Any) -> Iterator[Bucket]:
    """An empty one, which the running Spark knows."""
    import boto3

    known = spark.sparkContext._jsc.hadoopConfiguration()
    with moto() as (server, url):
        made, inner = Bucket(url), server._server.app

        def application(request: dict[str, Any], begin: Callable[..., Any]) -> Iterable[bytes]:
            if made.refused(request):
                begin("403 Forbidden", [("Content-Length", "0")])
                return []
            answer: Iterable[bytes] = inner(request, begin)
            return answer

        server._server.app = application
        client = boto3.client(
            "s3", endpoint_url=url, region_name="us-east-1", aws_access_key_id="tests", aws_secret_access_key="tests"
        )
        client.create_bucket(Bucket=made.name)
        for name, value in made.conf.items():
            known.set(name.removeprefix("spark.hadoop."), value)
        try:
            yield made
        finally:
            for name in made.conf:
                known.unset(name.removeprefix("spark.hadoop."))
