"""A client that has no broker any more, by its own reports."""

from __future__ import annotations

import json

import pytest
from confluent_kafka import Consumer

from harvester.stranded import Stranded, watched
from tests.support.wait import eventually

SECOND = 1_000_000


def report(second: float, *sources: str) -> str:
    """As the client writes it: no space behind a colon."""
    brokers = {str(number): {"source": source} for number, source in enumerate(sources)}
    return json.dumps({"ts": int(second * SECOND), "brokers": brokers}, separators=(",", ":"))


def test_what_cannot_be_read_and_kinds_that_are_not_known_say_nothing() -> None:
    stranded = Stranded()
    for second in range(9):
        stranded.heard(report(second, "logical", "discovered"))
        stranded.heard(report(second, "logical")[:-1])
    assert not stranded.is_so


@pytest.mark.parametrize("spaced", [False, True])
def test_who_has_no_broker_for_seconds_is_stranded_for_good(spaced: bool) -> None:
    stranded = Stranded()
    seen = []
    for second, sources in enumerate([
        ("configured",), ("learned", "logical"), ("logical",), (), ("configured",),  # found in time
        ("logical",), ("logical",), ("logical",), ("learned",),
    ]):  # fmt: skip
        text = report(second, *sources)
        stranded.heard(text.replace(":", ": ") if spaced else text)
        seen.append(stranded.is_so)
    assert seen == [False] * 7 + [True] * 2


def test_reports_go_on_to_whoever_had_asked_for_them() -> None:
    reports: list[str] = []
    given = {"stats_cb": reports.append, "a": 1, "statistics.interval.ms": 0}
    options, stranded = watched(given, every_ms=7)
    assert options["statistics.interval.ms"] == 7
    assert options["a"] == 1
    for second in (1, 2, 3, 4):
        options["stats_cb"](report(second, "logical"))
    assert stranded.is_so
    assert len(reports) == 4


def test_reports_of_the_real_client_are_understood() -> None:
    reports: list[str] = []
    given = {"bootstrap.servers": "127.0.0.1:1", "group.id": "g", "log_level": 0, "stats_cb": reports.append}
    options, stranded = watched(given, every_ms=50)
    client = Consumer(options)
    eventually(lambda: client.poll(0.01) or reports, what="a report")
    client.close()
    assert '"source":"configured"' in reports[0]
    assert {broker["source"] for broker in json.loads(reports[0])["brokers"].values()} == {"configured", "logical"}
    assert not stranded.is_so
