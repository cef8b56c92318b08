"""Stores for values that are too large for Kafka: a directory, and S3 as moto speaks it, in this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from harvester import StoreSettings


@pytest.fixture(scope="module")
def s3() -> Iterator[StoreSettings]:
    """A bucket. Credentials are in the environment, as for any client of S3."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "tests")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "tests")
        boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1").create_bucket(Bucket="values")
        yield StoreSettings("s3://values/of/tests", endpoint, "us-east-1")
    server.stop()


@pytest.fixture
def directory(tmp_path: Path) -> StoreSettings:
    (tmp_path / "values").mkdir()
    return StoreSettings(f"file://{tmp_path}/values")
