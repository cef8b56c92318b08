"""Stores for values that are too large for Kafka: a directory, and S3 as moto speaks it, in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from harvester import StoreSettings


@contextmanager
def moto() -> Iterator[tuple[Any, str]]:
    """A server that speaks S3, and its URL. All servers of a process share what they store."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        yield server, f"http://{host}:{port}"
    finally:
        server.stop()


@pytest.fixture(scope="module")
def s3() -> Iterator[StoreSettings]:
    """A bucket. Credentials are in the environment, as for any client of S3."""
    import boto3

    with moto() as (_, endpoint), pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "tests")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "tests")
        boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1").create_bucket(Bucket="values")
        yield StoreSettings("s3://values/of/tests", endpoint, "us-east-1")


@pytest.fixture
def directory(tmp_path: Path) -> StoreSettings:
    (tmp_path / "values").mkdir()
    return StoreSettings(f"file://{tmp_path}/values")
