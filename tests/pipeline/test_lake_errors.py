"""What `harvester pipeline lake` says when it cannot start, row by row of docs/pipeline.md; views; metrics.

Without Spark or Java, and with a connector that does not fit: test_session.
"""

from __future__ import annotations

import contextlib
import http.client
import re
import shutil
import socket
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from harvester_cli.main import main

from harvester.errors import ExitCode
from harvester.pipeline import session
from tests.support.harvested import KEPT, Sent, Writer
from tests.support.lakes import make_lake

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.conftest import MakeTopic
    from tests.support.servers import Servers

Command = Callable[..., tuple[int, list[str]]]


@pytest.fixture
def command(spark: SparkSession, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """The command line with the Spark of this process: exit code, and what it says on standard error."""

    @contextmanager
    def shared(*_: Any, **__: Any) -> Iterator[SparkSession]:
        yield spark

    def call(*arguments: str) -> tuple[int, list[str]]:
        given = ["harvester", "pipeline", "lake", "--once", "--set", "leader_group_id=test", *arguments]
        monkeypatch.setattr(sys, "argv", given)
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        said = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("pipeline: ")]
        return int(ended.value.code or 0), said

    monkeypatch.setattr(session, "session", shared)
    return call


def test_each_reason_not_to_start_is_one_line_with_an_exit_code_of_its_own(
    command: Command, spark: SparkSession, servers: Servers, make_topic: MakeTopic, tmp_path: Path
) -> None:
    topic, other, lake = make_topic(1, KEPT), make_topic(1, KEPT), tmp_path / "lake"
    Writer(servers.bootstrap).send(topic, [Sent(1)])
    kafka = ("--bootstrap", servers.bootstrap)
    args = ("--topic", topic, "--to", str(lake), *kafka)
    assert command(*args) == (0, [])

    def refused(code: ExitCode, said: str, *arguments: str) -> None:
        found, lines = command(*arguments)
        assert found == code, lines
        assert lines[0].startswith("harvester: ")
        assert said in lines[0]
        assert lines[1].startswith("hint: ")
        assert len(lines) == 2, lines

    refused(ExitCode.INPUT, "no topic missing-one at", *args, "--topic", "missing-one")
    refused(ExitCode.INPUT, "matches missing-.*", "--topic-pattern", "missing-.*", "--to", str(lake), *kafka)
    quick = ("--kafka", "default.api.timeout.ms=1500", "--kafka", "request.timeout.ms=1000")
    refused(
        ExitCode.UNAVAILABLE, "127.0.0.1:1", "--topic", topic, "--to", str(lake), "--bootstrap", "127.0.0.1:1", *quick
    )
    refused(ExitCode.CHECKPOINT, f"is for topics {topic}", "--topic", other, "--to", str(lake), *kafka)
    refused(ExitCode.TABLE, "another checkpoint", *args, "--checkpoint", str(tmp_path / "new"))
    spark.sql(f"ALTER TABLE delta.`{lake / 'current'}` ADD COLUMN (mine INT)")  # the user's own may stay
    assert command(*args) == (0, [])
    manifest = lake / "checkpoint" / "harvester.json"
    manifest.write_text(manifest.read_text().replace('"lake"', '"metrics"'))
    refused(ExitCode.CHECKPOINT, "belongs to the job metrics", *args)
    manifest.write_text("{")
    refused(ExitCode.CHECKPOINT, "cannot be read", *args)
    manifest.unlink()
    refused(ExitCode.CHECKPOINT, "is the checkpoint of something else", *args)
    for table in ("repeats", "silver"):
        shutil.rmtree(lake / table)
        (lake / table).mkdir()
        (lake / table / "part.csv").touch()
    (lake / "checkpoint").rename(tmp_path / "elsewhere")
    refused(ExitCode.TABLE, "is neither empty nor a table of Delta", *args)


@pytest.mark.usefixtures("command")
def test_the_queries_of_the_page_run_on_the_views_that_are_printed(
    spark: SparkSession,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent = [Sent(4711, b"customer-42"), Sent(4711, b"customer-42"), Sent(4712, b"other", None)]
    rows = [{"key": one.key, "value": one.value, "headers": one.written()} for one in sent]
    root = make_lake(spark, tmp_path / "lake", rows)
    page = (Path(__file__).parents[2] / "docs" / "pipeline.md").read_text(encoding="utf-8")
    listed = page.partition("### Five queries\n\n```sql\n")[2].partition("```")[0]
    monkeypatch.setattr(
        sys, "argv", ["harvester", "pipeline", "views", "--lake", root, "--set", "leader_group_id=test"]
    )
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    views = capsys.readouterr().out.splitlines()
    for line in views:
        spark.sql(line.removesuffix(";").replace("OR REPLACE VIEW", "OR REPLACE TEMP VIEW"))
    found = [spark.sql(one.replace("/data/lake", root)).collect() for one in listed.split(";") if one.strip()]
    counts = [len(rows) for rows in found]
    assert (counts[:3], counts[4:]) == ([2, 1, 1], [1]), "the fourth depends on today"
    assert found[1][0][0] == "customer-42"
    for name in ("bronze", "deliveries", "current", "history"):
        spark.catalog.dropTempView(name)


def test_batches_are_counted_for_prometheus(
    command: Command, servers: Servers, make_topic: MakeTopic, tmp_path: Path
) -> None:
    topic = make_topic(1, KEPT)
    sent = [Sent(1), Sent(2), Sent(1), Sent(3, value=b'{"n": "no"}'), Sent(4, headers=()), Sent(2), Sent(2)]
    Writer(servers.bootstrap).send(topic, sent)
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    found, ended = dict[str, float](), threading.Event()

    def scrape() -> None:
        while not ended.wait(0.05):
            # The job may end in the middle of an answer.
            refused = contextlib.suppress(OSError, http.client.HTTPException)
            with refused, urllib.request.urlopen(f"http://{address}/metrics") as answer:
                text = answer.read().decode()
                found.update((name, float(value)) for name, value in re.findall(r"^(\w+) (\S+)$", text, re.M))

    scraper = threading.Thread(target=scrape)
    scraper.start()
    try:
        args = ("--topic", topic, "--to", str(tmp_path / "lake"), "--bootstrap", servers.bootstrap)
        assert command(*args, "--json-schema", f"{topic}=n INT", "--listen", address) == (0, [])
    finally:
        ended.set()
        scraper.join()
    del found["harvester_lake_last_batch_timestamp_seconds"]
    assert found.pop("harvester_lake_batch_seconds_sum") > 0
    counts = {name.removeprefix("harvester_lake_"): value for name, value in found.items() if "_created" not in name}
    assert counts == {
        "records_total": 7, "repeats_total": 3, "rejects_total": 2, "batch_seconds_count": 1, "behind_records": 0
    }  # fmt: skip


@pytest.mark.parametrize("address", ["off", "9464", "localhost:99999"])
def test_an_address_that_is_none_is_refused(command: Command, address: str) -> None:
    code, lines = command("--topic", "any", "--to", "/nowhere", "--listen", address)
    assert code == ExitCode.USAGE
    assert "--listen" in "".join(lines)


def test_what_ends_the_stream_later_is_one_line_too(
    command: Command, servers: Servers, make_topic: MakeTopic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what our own code raises, which comes back through Java with two stack traces around it."""
    from harvester.pipeline.lake.batch import LakeBatch

    def broken(*_: Any) -> None:
        raise ZeroDivisionError("no number")

    monkeypatch.setattr(LakeBatch, "write", broken)
    topic = make_topic(1, KEPT)
    Writer(servers.bootstrap).send(topic, [Sent(1)])
    code, lines = command("--topic", topic, "--to", str(tmp_path / "lake"), "--bootstrap", servers.bootstrap)
    assert code == ExitCode.FAILED
    assert lines[0].startswith("harvester: the lake: ")
    assert "no number" in lines[0]
    assert len(lines) == 2, lines
