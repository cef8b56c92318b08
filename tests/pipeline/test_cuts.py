"""Cuts of a lake: the rows that a batch reads from its records, the views as of one, and what the brokers say."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from harvester_cli.main import main
from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for it

from harvester.errors import ExitCode
from harvester.pipeline import session
from harvester.pipeline.formats import open_store
from harvester.pipeline.lake.batch import batch_name
from tests.support.audits import Scene
from tests.support.harvested import CREATED_US, KEPT, SENT_MS, A, B, Sent, Writer
from tests.support.lakes import Lake, make_lake
from tests.support.sparks import assert_rows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.conftest import MakeTopic
    from tests.support.servers import Servers


def row(sent: Sent, topic: str = "orders") -> dict[str, Any]:
    at = datetime.fromtimestamp(sent.at_ms / 1000, UTC)
    return {"key": sent.key, "value": sent.value, "headers": sent.written(), "topic": topic, "timestamp": at}


@pytest.fixture
def command(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """`harvester pipeline views` with the Spark of this process; the exit code."""

    @contextmanager
    def shared(*_: Any, **__: Any) -> Iterator[SparkSession]:
        yield spark

    def call(*arguments: str) -> int:
        given = ["harvester", "pipeline", "views", "--set", "leader_group_id=test", *arguments]
        monkeypatch.setattr(sys, "argv", given)
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0)

    monkeypatch.setattr(session, "session", shared)
    return call


# A transfer writes both accounts; ids 3 and 4 belong together. B follows A. The offsets of all are different.
FIRST = [
    row(Sent(1, b"anna", b"0", low_water=1)), row(Sent(2, b"ben", b"9", low_water=2), "payments"),
    row(Sent(4, b"ben", b"4", low_water=3), "payments"),
]  # fmt: skip
SECOND = [
    row(Sent(3, b"anna", b"5", low_water=3)), row(Sent(5, b"anna", b"6", created_us=CREATED_US + 7, low_water=5)),
    row(Sent(7, b"ben", None, low_water=5), "payments"),
]  # fmt: skip
later = SENT_MS + 1000
THIRD = [
    row(Sent(6, b"carl", b"1", low_water=5)), row(Sent(1, b"anna", b"B", B, at_ms=later)),
    row(Sent(2, b"dora", b"B", B, at_ms=later, low_water=2)), row(Sent(8, b"ben", b"8"), "payments"),
]  # fmt: skip


def test_views_as_of_a_cut_show_what_the_source_had_then(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: Callable[..., int]
) -> None:
    batches = []
    for number, rows in enumerate((FIRST, SECOND, THIRD)):
        batches.append([{**one, "offset": 10 * number + at} for at, one in enumerate(rows)])
    root = make_lake(spark, tmp_path / "lake", *batches)
    store = open_store(spark, root)
    silver = [store.version("silver") - after for after in (2, 1, 0)]
    found = [
        {"incarnation": str(one), "id": low, "us": us, "silver_version": silver[number], "batch": batch_name(number)}
        for number, one, low, us in ((0, A, 3, CREATED_US), (1, A, 5, CREATED_US), (2, B, 2, CREATED_US))
    ]
    assert_rows(store.table("cuts").withColumn("us", F.unix_micros("at")), found)

    def as_of(cut: str) -> dict[str, bytes | None]:
        assert command("--lake", root, "--as-of", cut) == ExitCode.OK
        for line in capsys.readouterr().out.splitlines():
            spark.sql(line.removesuffix(";").replace("OR REPLACE VIEW", "OR REPLACE TEMP VIEW"))
        states = spark.table("current_as_of").collect()
        ids = {(one["incarnation"], one["id"]) for one in spark.table("deliveries_as_of").collect()}
        assert {(one["incarnation"], one["id"]) for one in spark.table("history_as_of").collect()} == ids
        return {one["key"].decode(): one["value"] and bytes(one["value"]) for one in states}

    assert as_of("0") == {"anna": b"0", "ben": b"9"}, "not the half of a transfer"
    assert as_of("1") == {"anna": b"5", "ben": b"4"}
    # Of the incarnation that is over, all that was read by then.
    assert as_of("latest") == as_of("2") == {"anna": b"B", "ben": b"8", "carl": b"1"}
    for wrong, code in (("3", ExitCode.INPUT), ("x", ExitCode.USAGE)):
        assert command("--lake", root, "--as-of", wrong) == code
    for name in ("deliveries_as_of", "current_as_of", "history_as_of"):
        spark.catalog.dropTempView(name)


def test_a_cut_waits_for_what_an_open_transaction_hides(
    spark: SparkSession, servers: Servers, database: str, make_topic: MakeTopic, tmp_path: Path
) -> None:
    """1 was acknowledged behind it, in its partition, before 2 was stamped."""
    topic, lake = make_topic(2, KEPT), Lake(spark, tmp_path / "lake", servers.bootstrap)
    lake.folds, writer = False, Writer(servers.bootstrap)
    with Scene(database, servers.bootstrap, topic).open_transaction():
        writer.send(topic, [Sent(1, partition=0, low_water=1), Sent(2, partition=1, low_water=2)])
        assert lake.once(topic) == 1
        assert lake.rows("cuts") == []
    assert lake.once(topic) == 1
    assert [tuple(one) for one in lake.rows("cuts", "id", "batch")] == [(2, batch_name(1))]

    # One that waits for offsets which a partition had before it was recreated does not stop others for ever.
    file, gone = lake.root / "checkpoint" / "ids" / "1.json", [[topic, 0, 1000], [topic, 1, 0]]
    file.write_text(json.dumps({**json.loads(file.read_text()), "cuts": {"marks": {str(A): [3, 0]}, "ends": gone}}))
    writer.send(topic, [Sent(3, partition=0, low_water=3)])
    assert lake.once(topic) == 1
    assert (3, batch_name(2)) in [tuple(one) for one in lake.rows("cuts", "id", "batch")]
