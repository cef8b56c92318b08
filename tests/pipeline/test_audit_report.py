"""The audit's pure parts: the page, the words, shards, terms, whole topics, and the data source for JDBC."""

from __future__ import annotations

import json
import queue
from dataclasses import replace
from html.parser import HTMLParser
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from psycopg.conninfo import make_conninfo

from harvester.errors import ConfigurationError
from harvester.pipeline.audit.checks import ProducerStream, terms
from harvester.pipeline.audit.inputs import PartitionInput, TopicBounds, whole_since
from harvester.pipeline.audit.job import stages_told
from harvester.pipeline.audit.page import page
from harvester.pipeline.audit.report import (
    HOLES,
    AuditFinding,
    AuditReport,
    FindingGroup,
    HotKey,
    Latency,
    advice,
    grouped,
    key_text,
    not_judged,
)
from harvester.pipeline.audit.schemas import FindingKind, Severity
from harvester.pipeline.audit.skew import SHARDS, skew
from harvester.pipeline.jdbc import jdbc_source
from tests.support.audits import at

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

HOSTILE = "</text><script>alert('x')</script>&\"<img src=x onerror=alert(1)>"
VOID = {"meta", "img", "br", "link", "input"}


class Page(HTMLParser):
    """Tags that are opened, the text, and whether every tag is closed where it should be."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        assert not [name for name, _ in attrs if name.startswith("on") or name in ("src", "href")]
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def finding(kind: FindingKind, severity: Severity, key: str = "key", number: int = 1) -> AuditFinding:
    return AuditFinding(kind, severity, "an incarnation", number, "orders", 0, 7, key, f"because of {key}", at(1))


def report(*found: FindingGroup, key: str = "key", hours: int = 3) -> AuditReport:
    kinds = {kind.name.lower(): sum(one.count for one in found if one.kind is kind) for kind in FindingKind}
    figures = {"records": 10, "ids": 10, "deliveries": 10, "archived": 10, "quarantined": 1, "pending": 0}
    latency = [Latency("orders", at(3600 * hour), 5, 1.0, 2.0, 30.0 if hour else None, 900.0) for hour in range(hours)]
    streams = tuple(
        ProducerStream("an incarnation", term, 0, 1, 5, at(term * 10), at(term * 10 + 4)) for term in (1, 2)
    )
    return AuditReport(
        audited_at=at(9999), source=f"topics {key}", topics=(key,), since=None, until=at(99),
        figures={**figures, **kinds, **dict.fromkeys(HOLES, 0)}, found=found,
        not_judged=(f"lost: {key}",), latency=(Latency("orders", None, 10, 1.0, 2.0, 30.0, 900.0), *latency),
        hot_keys=(HotKey(key, 6, 0.6),), skew=skew({0: 6, 5: 4}, 2, 0, 6), streams=streams, terms=terms(streams),
    )  # fmt: skip


def test_the_page_is_whole_and_says_the_verdict_first() -> None:
    lost = FindingGroup(FindingKind.LOST, Severity.VIOLATION, 12, (finding(FindingKind.LOST, Severity.VIOLATION),))
    twice = FindingGroup(FindingKind.REPEAT, Severity.SUSPECT, 1, (finding(FindingKind.REPEAT, Severity.SUSPECT),))
    text = page(report(lost, twice))
    seen = Page(text)
    assert seen.tags.count("svg") == 2
    assert {"path", "circle", "rect"} <= set(seen.tags)
    assert "10:00 900 ms" in seen.text
    assert text.count('<table class="bars">') == 3
    assert seen.text.index("The guarantees do not hold: 12 lost.") < seen.text.index("Findings")
    assert "12 lost, the first 1" in seen.text
    assert "prefers-color-scheme: dark" in text
    assert "http" not in text  # nothing comes from elsewhere
    for made in (report(hours=0), report(twice), report(hours=300), replace(report(), skew=None, streams=(), terms=())):
        Page(page(made))
    keyless = page(replace(report(), hot_keys=(), skew=skew({}, 0, 5, 0)))
    assert "Without keys any number of shards is loaded evenly." in Page(keyless).text
    assert "No guarantee was broken; 1 suspect findings." in page(report(twice))


def test_what_records_say_is_text_and_nothing_else() -> None:
    hostile = FindingGroup(
        FindingKind.SWAPPED, Severity.VIOLATION, 1, (finding(FindingKind.SWAPPED, Severity.VIOLATION, HOSTILE),)
    )
    text = page(report(hostile, key=HOSTILE))
    seen = Page(text)
    assert not {"script", "img"} & set(seen.tags)
    assert seen.text.count(HOSTILE) >= 4
    json.loads(report(hostile, key=HOSTILE).to_json())


def test_findings_are_grouped_violations_first() -> None:
    rows = [(finding(FindingKind.REPEAT, Severity.SUSPECT), 1)]
    rows += [(finding(FindingKind.GAP, Severity.VIOLATION, number=number), 30) for number in range(12)]
    rows += [(finding(FindingKind.LOST, Severity.SUSPECT), 2)]
    found = grouped(rows)
    assert [(one.kind, one.severity, one.count, len(one.examples)) for one in found] == [
        ("gap in a lane", "violation", 30, 10), ("lost", "suspect", 2, 1), ("repeated", "suspect", 1, 1),
    ]  # fmt: skip
    assert not replace(report(), found=found).holds
    assert replace(report(), found=found[1:]).holds
    assert [key_text(raw) for raw in (None, b"", "ä".encode(), b"\xff")] == [None, "", "ä", "base64:/w=="]


counts = st.dictionaries(st.integers(0, 479), st.integers(1, 10_000), max_size=40)


@given(buckets=counts, keyless=st.integers(0, 1000))
def test_no_number_of_shards_carries_more_than_the_hottest_key_allows(buckets: dict[int, int], keyless: int) -> None:
    hottest = max(buckets.values(), default=0)
    judged = skew(buckets, len(buckets), keyless, hottest)
    best = max(load.carried for load in judged.loads)
    advised = next(load for load in judged.loads if load.shards == judged.advised)
    assert judged.records == sum(buckets.values()) + keyless
    for load in judged.loads:
        assert 1 / load.shards <= load.busiest * 1.000001
        assert load.carried <= min(load.shards, judged.most) * 1.000001
    assert advised.carried >= 0.75 * best
    assert not [load for load in judged.loads if load.shards < judged.advised and load.carried >= 0.75 * best]


def test_the_advice_names_keys_that_dominate() -> None:
    alone = skew({7: 100}, 1, 0, 100)
    assert alone.advised == 1
    assert advice(alone, [HotKey("k", 100, 1.0)]) == (
        "100 records of 1 keys. The hottest key, 'k', has 100.0%: no number of shards can carry more than 1.0 times the"
        " load of one. Advised: 1 shards, which carry 1.0 times the load of one; up to 32 carry 1.0 times. Keys that"
        " dominate: 'k'."
    )
    even = skew(dict.fromkeys(range(480), 10), 480, 0, 10)
    assert (even.advised, even.loads[-1].carried) == (24, SHARDS[-1])
    assert advice(even, [HotKey("k", 10, 1 / 480)]).endswith("No key dominates.")
    assert "loaded evenly" in advice(skew({}, 0, 5, 0), [])


def test_terms_follow_each_other_within_an_incarnation() -> None:
    streams = [
        ProducerStream("b", 1, 0, 1, 5, at(100), at(110)),
        ProducerStream("a", 2, 0, 3, 5, at(20), at(40)), ProducerStream("a", 1, 1, 2, 1, at(5), at(30)),
        ProducerStream("a", 1, 0, 1, 2, at(0), at(9)),
    ]  # fmt: skip
    found = [(one.incarnation, one.term, one.lanes, one.records, one.silence_s) for one in terms(streams)]
    assert found == [("a", 1, 2, 3, None), ("a", 2, 1, 5, -10.0), ("b", 1, 1, 5, None)]


def partition(first_offset: int, first_s: float) -> PartitionInput:
    return PartitionInput(5, 0, first_offset, at(first_s), at(first_s + 9))


def test_topics_are_whole_since_the_latest_beginning_of_a_partition_that_was_cut() -> None:
    read = {("a", 0): partition(3, 1), ("a", 1): partition(50, 7), ("b", 0): partition(9, 4)}
    earliest = {("a", 0): 0, ("a", 1): 50, ("b", 0): 9, ("b", 1): 12}
    bounds = TopicBounds(earliest, earliest, {("a", 0): 9, ("a", 1): 60, ("b", 0): 20, ("b", 1): 12})
    # a[0] begins with aborted records; b[1] is empty now, and was not always.
    assert whole_since(bounds, read, None) == (at(7), (("b", 1),))
    ranged = replace(bounds, start={**earliest, ("a", 1): 55})
    assert whole_since(ranged, read, at(2)) == (at(4), (("b", 1),))
    assert whole_since(None, read, at(2)) == (at(2), ())
    assert whole_since(None, read, None) == (at(7), ())
    late = [("a", 0), ("c", 1)]  # c[1] was empty already when the lake began
    assert whole_since(None, read, None, late) == (at(7), (("c", 1),))
    assert whole_since(None, read, at(2), late) == (at(2), ())
    assert json.loads(ranged.options()["startingOffsets"]) == {"a": {"0": 0, "1": 55}, "b": {"0": 9, "1": 12}}


def test_every_limit_is_told() -> None:
    nothing: dict[str, object] = {
        "history": True, "archive": True, "archived": 5, "beyond": 0, "records": 5, "foreign": 0, "pending": 0,
        "other_topics": (), "compacted": (), "emptied": (), "whole": None, "latest": None, "record_timestamps": False,
    }  # fmt: skip
    changes: list[tuple[dict[str, object], str]] = [
        ({"history": False}, "--no-history"), ({"archive": False}, "without an archive"),
        ({"archived": 0}, "the archive has nothing"), ({"beyond": 3}, "3 ids of the archive"),
        ({"records": 0}, "nothing was read"), ({"foreign": 2}, "2 records have no valid header"),
        ({"pending": 1}, "not final"), ({"other_topics": {"x", "y"}}, "not read: x, y;"),
        ({"compacted": ["x"]}, "compacted topics: x"), ({"emptied": ["x[0]"]}, "emptied by retention: x[0]"),
        ({"whole": at(0)}, "gaps before 2026-03-01 10:00:00 UTC"), ({"latest": at(0)}, "purged after 2026-03-01"),
        ({"record_timestamps": True}, "create_time"), ({"anew": ["x"]}, "offsets began again: x"),
        ({"half_written": True}, "with --checkpoint"), ({"behind": {"x", "y"}}, "not have read far enough: x, y"),
    ]  # fmt: skip
    assert not_judged(**nothing) == ()  # type: ignore[arg-type]
    for change, said in changes:
        [line] = not_judged(**{**nothing, **change})  # type: ignore[arg-type]
        assert said in line


@pytest.mark.parametrize(
    ("dsn", "url", "properties"),
    [
        ("host=db dbname=app user=me password=p", "jdbc:postgresql://db:5432/app", {"user": "me", "password": "p"}),
        ("postgresql://me:s%40@[::1]:5433,b/a%20b", "jdbc:postgresql://[::1]:5433,b:5432/a%20b", {"password": "s@"}),
        ("host=a port=1 user=me sslmode=require sslrootcert=/ca", "jdbc:postgresql://a:1/me", {"sslmode": "verify-ca"}),
        (
            "host=a user=u sslrootcert=system", "jdbc:postgresql://a:5432/u",
            {"sslmode": "verify-full", "sslfactory": "org.postgresql.ssl.DefaultJavaSSLFactory"},
        ),
        (
            "host=a,b port=1,2 dbname=u target_session_attrs=any", "jdbc:postgresql://a:1,b:2/u",
            {"targetServerType": "any"},
        ),
        ("host=a hostaddr=10.0.0.1 user=u", "jdbc:postgresql://10.0.0.1:5432/u", {"targetServerType": "primary"}),
    ],
)  # fmt: skip
def test_a_data_source_for_jdbc(dsn: str, url: str, properties: dict[str, str]) -> None:
    source = jdbc_source(dsn, {})
    assert source.url == url
    assert properties.items() <= source.properties.items()
    assert source.options == {"url": url, "driver": "org.postgresql.Driver", **source.properties}


@pytest.mark.parametrize(
    ("dsn", "said"),
    [
        ("dbname=app password=geheim", "Unix socket"), ("host=/run/geheim", "Unix socket"),
        ("host=a sslkey=/geheim.key", "PEM"), ("host=a service=geheim", "service"),
        ("host=a passfile=/geheim", "passfile"), ("host=a hostaddr=1.1.1.1 sslmode=verify-full", "verify-full"),
        ("host=a gehiem=geheim", "unknown to PostgreSQL"), ("host=a,b port=1,2,3", "ports"),
    ],
)  # fmt: skip
def test_what_the_jdbc_driver_cannot_do_is_refused(dsn: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said) as caught:
        jdbc_source(dsn, {})
    assert "geheim" not in str(caught.value)


@given(
    password=st.text(st.characters(blacklist_characters="\x00", blacklist_categories=["Cs"]), min_size=1),
    name=st.text("ab/?&%# =", min_size=1),
)
def test_a_password_stands_in_no_url_and_in_no_repr(password: str, name: str) -> None:
    marked = f"<{password}>"
    source = jdbc_source(make_conninfo("", host="db", dbname=name, user="me", password=marked), {})
    assert source.properties["password"] == marked
    assert marked not in source.url
    assert "password" not in repr(source)
    assert source.url.count("/") == 3
    assert not set("?&# ") & set(source.url)


def test_progress_is_told_while_stages_run() -> None:
    """A Spark with two stages at work, the second of which has ended when it is asked about."""
    stages = {1: SimpleNamespace(numTasks=1200, numCompletedTasks=7), 2: None}
    tracker = SimpleNamespace(getActiveStageIds=lambda: list(stages), getStageInfo=stages.get)
    spark = SimpleNamespace(sparkContext=SimpleNamespace(statusTracker=lambda: tracker))
    told: queue.Queue[str] = queue.Queue()
    with stages_told(cast("SparkSession", spark), told.put, every_s=0.001):
        assert told.get(timeout=30) == "7 of 1,200 tasks done"
        stages[2] = SimpleNamespace(numTasks=1, numCompletedTasks=1)
        assert told.get(timeout=30) == "8 of 1,201 tasks done"
    assert told.empty()  # nothing new, nothing said


def test_defaults_of_libpq_fill_what_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("PGHOST", "there"), ("PGPORT", "77"), ("PGUSER", "me"), ("PGPASSWORD", "pw")):
        monkeypatch.setenv(name, value)
    source = jdbc_source("dbname=app")
    assert source.url == "jdbc:postgresql://there:77/app"
    assert (source.properties["user"], source.properties["password"]) == ("me", "pw")
