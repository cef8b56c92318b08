"""The examples of docs/consumers.md run, and its table is the one that is made."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import psycopg
import pytest
from confluent_kafka import Producer

from harvester.idempotence import Origin, SeenIds, table_sql
from harvester.origin import HEADER, SIZE
from harvester.verify.sequences import Hole
from tests.support.inbox import ONE, Forged, stamped

PAGE = (Path(__file__).parents[2] / "docs" / "consumers.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def example(containing: str, **names: Any) -> dict[str, Any]:
    (found,) = [block for block in blocks("python") if containing in block]
    exec(compile(found, "consumers.md", "exec"), names)
    return names


def test_the_table_is_the_one_that_is_made() -> None:
    assert blocks("sql") == [table_sql()]


def test_the_layout_adds_up() -> None:
    rows = re.findall(r"^\| (\d+) \| (\d+) \| \w", PAGE, re.MULTILINE)
    at = 0
    for begin, size in rows:
        assert int(begin) == at
        at += int(size)
    assert at == SIZE
    assert f"{SIZE} bytes" in PAGE


def test_the_header_is_read_and_remembered() -> None:
    origin = example("decode(find(", message=Forged(0, stamped(7, low_water=5)))["origin"]
    assert isinstance(origin, Origin)
    stored = example("seen.to_bytes()", origin=origin)["stored"]
    assert [last for _, last in SeenIds.from_bytes(stored).intervals(ONE)] == [4, 7]


def test_the_sequences_are_judged(capsys: pytest.CaptureFixture[str]) -> None:
    origins = [(Origin(ONE, number, 1, 0, 1, number, 0), number) for number in (1, 3)]
    verdict = example("Sequences()", origins=origins, given_up=[])["verdict"]
    assert verdict.holes[Hole.OPEN] == 1
    assert "number 2 under way or lost" in capsys.readouterr().out


@pytest.mark.servers
def test_the_inbox_consumes(servers: Any, empty_database: str, topic: str, group: str) -> None:
    consume = example("def consume(")["consume"]
    producer = Producer({"bootstrap.servers": servers.bootstrap, "broker.address.family": "v4", "linger.ms": 0})
    for value, record_id in (("a", 2), ("b", 1), ("a", 2), ("c", 3), ("b", 1)):
        headers: list[tuple[str, str | bytes | None]] = [(HEADER, stamped(record_id))]
        producer.produce(topic, value.encode(), key=b"k", headers=headers)
    assert producer.flush(30) == 0
    with psycopg.connect(empty_database, autocommit=True) as connection:
        connection.execute("CREATE TABLE ledger (at serial, entry text)")

        def consumed() -> int | None:
            if connection.execute("SELECT to_regclass('harvester_inbox')").fetchone() == (None,):
                return 0
            row = connection.execute("SELECT max(next_offset) FROM harvester_inbox").fetchone()
            return row[0] if row else None

        consume(empty_database, servers.bootstrap, [topic], group, lambda: (consumed() or 0) < 5)
        assert connection.execute("SELECT entry FROM ledger ORDER BY at").fetchall() == [("a",), ("b",), ("c",)]
