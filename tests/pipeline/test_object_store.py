"""A lake on an object store, where a directory is no more than a name and to rename a file is to copy it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from py4j.protocol import Py4JJavaError

from harvester.pipeline import tables
from harvester.pipeline.errors import PipelineError
from tests.support.harvested import KEPT, Sent, Writer
from tests.support.lakes import Lake, Oracle
from tests.support.longs import long

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.conftest import MakeTopic
    from tests.support.object_store import Bucket
    from tests.support.servers import Servers


@long  # what differs from a directory is how a file is replaced: below
def test_a_lake_is_written_cut_off_and_gone_on_with(
    spark: SparkSession, servers: Servers, make_topic: MakeTopic, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, oracle, writer = make_topic(2, KEPT), Oracle(), Writer(servers.bootstrap)
    lake = Lake(spark, Path(), servers.bootstrap, bucket.url("a lake"))
    first = [Sent(number, b"k-%d" % (number % 3)) for number in range(20)]
    oracle.take(writer.send(topic, [*first, first[3].again(1)]))
    assert lake.once(topic) == 21
    lake.assert_holds(oracle)

    oracle.take(writer.send(topic, [*(one.again(50) for one in first[:5]), Sent(20, b"k-0"), Sent(21, b"k-1", None)]))
    with monkeypatch.context() as patch:
        patch.setattr(bucket, "refused", lambda one: one["REQUEST_METHOD"] == "PUT" and "/ids/" in one["PATH_INFO"])
        with pytest.raises(PipelineError, match=r"a lake/checkpoint/ids/1\.json: .*Status Code: 403"):
            lake.once(topic)
    lake.once(topic, compact_every=1)
    lake.assert_holds(oracle)


def test_a_file_is_replaced_all_at_once(spark: SparkSession, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever step of it fails, the file is there: the old one or the new one."""
    file = bucket.url("checkpoint/harvester.json")
    tables.write_text(spark, file, "old")
    for method in ("PUT", "COPY", "DELETE"):

        def refused(request: dict[str, str], method: str = method) -> bool:
            copies = "HTTP_X_AMZ_COPY_SOURCE" in request
            return method == ("COPY" if copies else request["REQUEST_METHOD"])

        with monkeypatch.context() as patch:
            patch.setattr(bucket, "refused", refused)
            try:
                tables.write_text(spark, file, method)
            except Py4JJavaError:
                assert tables.read_text(spark, file) == "old"
            else:
                assert tables.read_text(spark, file) == method
        tables.write_text(spark, file, "old")
    assert tables.listing(spark, bucket.url("checkpoint")) == ["harvester.json"]


def test_on_a_local_disk_too(spark: SparkSession, tmp_path: Path) -> None:
    """Whoever looks at any time finds it, whole."""
    file, ended, looks = tmp_path / "harvester.json", threading.Event(), 0
    tables.write_text(spark, str(file), "0")

    def write() -> None:
        try:
            for number in range(1, 101):
                tables.write_text(spark, str(file), str(number))
        finally:
            ended.set()

    writer = threading.Thread(target=write)
    writer.start()
    while not ended.is_set():
        assert file.read_text().isdigit()
        looks += 1
    writer.join()
    assert looks > 100
    (tmp_path / ".harvester.json.crc").write_bytes(b"of a file that an earlier version has written")
    tables.write_text(spark, str(file), "last")
    assert tables.read_text(spark, str(file)) == "last"
