"""The incremental audit: planted defects are found in what is new, and clean data has none."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harvester.claim_check import reference
from harvester.errors import ExitCode, SchemaError
from harvester.origin import HEADER
from harvester.outbox.connection import connect
from harvester.pipeline import streaming
from harvester.pipeline.audit import proof
from harvester.pipeline.audit.job import AuditSettings
from harvester.pipeline.audit.proof import NOTHING, BucketSums, unequal, verdict_of, with_contents
from harvester.pipeline.audit.report import AuditReport, FindingGroup
from harvester.pipeline.audit.schemas import AuditVerdict, FindingKind, Severity
from harvester.pipeline.errors import InputMissing
from harvester.pipeline.formats import open_store
from harvester.pipeline.lake.batch import LakeBatch
from harvester.pipeline.origin_columns import bronze_columns
from tests.support.audits import Scene, Sent, at, audit_command
from tests.support.lakes import make_lake
from tests.support.longs import long
from tests.support.sparks import kafka_rows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.servers

STEP = 1000  # ids, so that a bucket has four or five records
TOPIC = "orders"
Headers = tuple[tuple[str, bytes], ...]


@dataclass
class Book:
    """A database's archive and a lake beside it."""

    spark: SparkSession
    root: str
    scene: Scene
    batches: int = 0
    offset: int = 0
    more: dict[int, Headers] = field(default_factory=dict)  # of a record of this id, before the harvester's
    behind: dict[int, Headers] = field(default_factory=dict)

    def __post_init__(self) -> None:
        make_lake(self.spark, Path(self.root))
        manifest = streaming.Manifest("test", "lake", (TOPIC,), HEADER)
        streaming.store(self.spark, f"{self.root}/checkpoint", manifest)

    def own(self, first: int, last: int) -> list[Sent]:
        """Records with these numbers; each says that all before it are settled."""
        return [
            Sent(
                STEP * number, b"key %d" % (number % 6), number, number, self.scene.incarnation, value=b"%d" % number,
                low_water=STEP * number,
            )
            for number in range(first, last + 1)
        ]  # fmt: skip

    def read(self, sent: Iterable[Sent]) -> None:
        """As one batch."""
        rows = []
        for one in sent:
            headers = [*self.more.get(one.id, ()), *(one.headers or ()), *self.behind.get(one.id, ())]
            rows.append({**one.row(), "headers": headers, "offset": self.offset})
            self.offset += 1
        batch = LakeBatch(open_store(self.spark, self.root), f"{self.root}/checkpoint", "test", HEADER, {})
        batch.write(bronze_columns(kafka_rows(self.spark, rows)), self.batches)
        self.batches += 1

    def archive(self, sent: Sequence[Sent], headers: Mapping[str, str] | None = None, *, rows: bool = True) -> None:
        """As purges leave them, with `archive = "rows"` or "ids"."""
        self.scene.archive(sent)
        if not rows:
            return
        with psycopg.connect(self.scene.dsn, autocommit=True) as connection:
            for one in sent:
                connection.execute(
                    "UPDATE outbox_archive SET kafka_value = %s, kafka_header_keys = %s, kafka_header_values = %s"
                    " WHERE id = %s",
                    (one.value, list(headers or {}), list((headers or {}).values()), one.id),
                )

    def prove(self) -> tuple[AuditReport, tuple[proof.Proof, ...]]:
        return proof.run(self.spark, AuditSettings(lake=self.root, dsn=self.scene.dsn))


@pytest.fixture
def book(spark: SparkSession, database: str, tmp_path: Path) -> Book:
    return Book(spark, str(tmp_path / "lake"), Scene(database, "", TOPIC))


@pytest.fixture
def command(book: Book, spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """`harvester pipeline audit --incremental` with the Spark of this process; the exit code."""
    return partial(audit_command(spark, monkeypatch), book.scene, "--incremental")


def found(report: dict[str, Any]) -> list[tuple[str, str, list[int]]]:
    return [
        (one["kind"], one["severity"], [example["id"] // STEP for example in one["examples"]])
        for one in report["found"]
    ]


@long  # test_audit plants the same every day, and the tests below compare sums
def test_each_planted_defect_is_found_in_what_is_new(
    book: Book, spark: SparkSession, command: Callable[..., int], capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(proof, "_PIECE_IDS", 1)  # a query for each bucket
    large, lake = b"x" * 2000, ("--lake", book.root)
    url, digest = b"s3://bucket/orders/6000", sha256(large).hexdigest().encode()
    with pytest.raises(InputMissing, match="has no cut yet"):
        book.prove()

    # Clean: a tombstone, a record without key, headers, a value that is elsewhere, a trace that was continued, and the
    # headers of another record, copied by the application.
    clean = book.own(1, 20)
    clean[3] = replace(clean[3], value=None)
    clean[4] = replace(clean[4], key=None)
    trace: Headers = (("trace", "é".encode()), ("empty", b""))
    refers = ((reference.HEADER, url), (reference.BYTES_HEADER, b"2000"), (reference.DIGEST_HEADER, digest))
    span = ("traceparent", b"00-1-2-01")
    book.more = {5000: trace, 6000: (*trace, *refers), 7000: (*trace, span), 8000: trace, 9000: (*trace, *refers)}
    book.more[10_000] = refers
    book.behind = {8000: (span,), 9000: (span, ("tracestate", b"a=b"))}  # as earlier versions put them
    book.read(replace(one, value=url) if one.id in (6000, 9000) else one for one in clean)
    for one in clean:
        stored = replace(one, value=large) if one.id in (6000, 9000) else one
        began = {"TraceParent": "00-1-1-01"} if one.id in (7000, 8000, 9000) else {}
        own = {**began, "trace": "é", "empty": ""} if one.id != 10_000 else {k: v.decode() for k, v in refers}
        book.archive([stored], own if one.id in book.more else None)
    report, [first] = book.prove()
    assert (report.found, first.verdict, first.unequal) == ((), AuditVerdict.EQUAL, 0)
    assert (first.from_id, first.to_id, first.records, first.with_contents) == (1000, 20_000, 19, 19)
    assert (first.buckets, report.figures["ids"], report.figures["delivered"]) == (5, 19, 19)
    assert book.prove()[1] == ()

    # 20 is new as well: the first cut did not cover it. A loss that was accepted long before explains nothing.
    new = book.own(21, 50)
    new[9] = replace(new[9], value=None)
    book.archive(new)
    with psycopg.connect(book.scene.dsn, autocommit=True) as connection:  # as an outbox with NULL as headers has it
        none = "UPDATE outbox_archive SET kafka_header_keys = NULL, kafka_header_values = NULL WHERE id = %s"
        connection.execute(none, (new[9].id,))
    store = open_store(spark, book.root)
    loss = (TOPIC, 0, 5, None, at(-100))
    store.append(spark.createDataFrame([loss], store.table("losses").schema), "losses")
    wrong = {
        25: None,  # missing
        30: None,  # the tombstone, beside a record with another value
        31: replace(new[10], value=b"another"),
        36: replace(new[15], key=b"of another"),
    }
    book.read(one for one in (wrong.get(one.id // STEP, one) for one in new) if one is not None)
    store.append(store.table("silver").where(f"id = {45 * STEP}"), "silver")
    assert command(*lake, "--json") == ExitCode.FAILED
    said = json.loads(capsys.readouterr().out)
    assert found(said) == [
        ("lost", "violation", [25, 30]), ("repeated", "violation", [45]), ("not as archived", "violation", [31, 36]),
    ]  # fmt: skip
    assert said["figures"]["ids"] == 28
    rows = sorted(store.table("proofs").collect(), key=lambda one: one["from_id"])
    named = ("from_id", "to_id", "records", "buckets", "unequal", "verdict", "topics")
    assert [tuple(one[name] for name in named) for one in rows] == [
        (1000, 20_000, 19, 5, 0, "equal", TOPIC), (20_000, 50_000, 30, 8, 4, "broken", TOPIC),
    ]  # fmt: skip
    assert command(*lake, "--json-file", "/dev/full") == ExitCode.UNAVAILABLE
    assert capsys.readouterr().out == "Nothing new: the archive has no ids from the last proof to the newest cut.\n"

    # What was erased from the lake alone is explained; what nobody purged is suspect; of ids alone, no value is judged,
    # also in the bucket in which the archive had begun with contents.
    last = book.own(51, 70)
    gone, strange = last[4], last[12]
    book.archive([one for one in last if one is not strange], rows=False)
    book.read(replace(one, value=b"another") for one in last if one is not gone)
    scope = (str(gone.incarnation), gone.term, gone.lane, gone.producer, gone.sequence)
    erased = spark.createDataFrame([(*scope, at(999), TOPIC, at(gone.seconds))], store.table("erasures").schema)
    store.append(erased, "erasures")
    assert command(*lake) == ExitCode.OK
    lines = capsys.readouterr().out.splitlines()
    incarnation = book.scene.incarnation
    assert lines[0] == (
        f"ids from 50000 to before 70000 of {incarnation}: 19 records in 5 buckets, of which 3 differ: suspect"
    )
    assert [line for line in lines if line.startswith(("accepted", "suspect"))] == [
        "suspect: 1 not in the history", "accepted: 1 accepted loss",
    ]  # fmt: skip
    assert f"not judged: ids of {incarnation} from 70000 on: not judged, the newest cut ends there" in lines
    assert "not judged: contents: not judged for 18 records, of which the archive has no values" in lines

    # Where a topic is added, everything is new.
    streaming.store(spark, f"{book.root}/checkpoint", streaming.Manifest("test", "lake", (TOPIC, "more"), HEADER))
    assert [one.from_id for one in book.prove()[1]] == [1000]

    refused = (*lake, "--json-file", book.root), (*lake, "--html", "/none/report.html")
    for arguments in (("--topic", TOPIC), (*lake, "--from", "2h"), (*lake, "--no-history"), *refused):
        assert command(*arguments) == ExitCode.USAGE
    with psycopg.connect(book.scene.dsn, autocommit=True) as connection:
        connection.execute("DROP TABLE outbox_archive")
    with pytest.raises(SchemaError, match="there is no archive"):
        book.prove()


@long  # test_what_differs_for_no_reason_is_suspect decides what is judged yet
def test_a_topic_that_was_just_added_is_proved_when_it_has_been_read(book: Book, spark: SparkSession) -> None:
    """An earlier cut says nothing of it: what was archived of it below is not lost, and is not passed over.

    Nor of one that was retired and is named again.
    """
    first, (there, later) = book.own(1, 3), [replace(one, topic="more") for one in book.own(4, 5)]
    book.read(first)
    book.archive([*first, there])
    [proved] = book.prove()[1]
    assert (proved.to_id, proved.records) == (3000, 2)
    added, returned = streaming.TopicLog("b", 1), streaming.TopicLog("b", 0, 1)
    assert added.read_since == returned.read_since == 1
    logs = {TOPIC: streaming.TopicLog("a", 0), "more": returned}
    manifest = streaming.Manifest("test", "lake", (TOPIC, "more"), HEADER, logs=logs)
    streaming.store(spark, f"{book.root}/checkpoint", manifest)
    report, proofs = book.prove()
    assert (report.found, proofs) == ((), ())
    book.offset = 0
    book.read([there, later])
    book.archive([later])
    report, [proved] = book.prove()
    assert (report.found, proved.from_id, proved.to_id, proved.records) == ((), 1000, 5000, 4)


@given(st.integers(-(2**62), 2**62), st.integers(1, 2**62))
def test_the_pieces_of_a_range_are_all_of_it_and_divide_no_bucket(first: int, size: int) -> None:
    pieces = proof.IdRange("a", first, first + size, ()).pieces()
    assert (pieces[0].first, pieces[-1].end) == (first, first + size)
    assert len(pieces) <= 66
    for one, other in pairwise(pieces):
        assert one.first < one.end == other.first
        assert one.end % 2**proof.BITS == 0


@long
def test_an_archive_may_take_longer_to_read_than_other_servers_take_to_answer(
    book: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    book.read(book.own(1, 5))
    book.archive(book.own(1, 5))
    with psycopg.connect(book.scene.dsn, autocommit=True) as connection:
        connection.execute("ALTER TABLE outbox_archive RENAME TO slow")
        connection.execute("CREATE VIEW outbox_archive AS SELECT slow.* FROM slow, pg_sleep(0.6)")
    monkeypatch.setitem(cast(Any, connect).__kwdefaults__, "silence_s", 0.3)
    report, [proved] = book.prove()
    assert (report.found, proved.records, proved.verdict) == ((), 4, AuditVerdict.EQUAL)


def test_what_differs_for_no_reason_is_suspect() -> None:
    found = {one: (FindingGroup(FindingKind.LOST, one, 1, ()),) for one in Severity}
    assert verdict_of(0, 0, ()) is AuditVerdict.EQUAL
    assert verdict_of(1, 0, ()) is verdict_of(1, 1, found[Severity.SUSPECT]) is AuditVerdict.SUSPECT
    assert verdict_of(1, 1, ()) is verdict_of(1, 0, found[Severity.ACCEPTED]) is AuditVerdict.EXPLAINED
    both = (*found[Severity.SUSPECT], *found[Severity.VIOLATION])
    assert verdict_of(1, 0, both) is AuditVerdict.BROKEN


def test_buckets_are_equal_only_if_records_and_both_sums_are() -> None:
    one = BucketSums(3, 1, 5, 7)
    assert unequal({1: one, 2: one}, {1: one, 2: one}) == []
    assert unequal({2: one}, {1: one, 2: one}) == unequal({1: one, 2: one}, {2: one}) == [1]
    assert unequal({1: NOTHING}, {}) == []
    for other in (replace(one, records=4), replace(one, names=6), replace(one, contents=8)):
        assert unequal({1: other}, {1: one}) == unequal({1: one}, {1: other}) == [1]
    # An archive of ids has no contents, unless it is of tombstones; one of both has some. Too large a sum is no sum.
    bare = replace(one, bare=3)
    assert unequal({1: replace(bare, contents=8)}, {1: bare}) == [1]
    some = replace(one, bare=2)
    assert (unequal({1: replace(one, contents=8)}, {1: some}), with_contents({1: one}, {1: some})) == ([1], 2)
    assert unequal({1: replace(one, contents=8)}, {1: bare}) == []
    assert (with_contents({1: one}, {1: bare, 2: one}), with_contents({1: bare}, {1: one, 2: NOTHING})) == (2, 3)
    none = BucketSums(3, 1, None, None)
    assert unequal({1: none}, {1: none}) == [1]
