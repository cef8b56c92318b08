"""A lake that cannot go on, and how it does: lost records, retired topics, a lost checkpoint; where one begins."""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from harvester.errors import HarvesterError
from harvester.failpoints import VARIABLE
from harvester.pipeline import schemas, source
from harvester.pipeline.errors import CheckpointMismatch, InputMissing, PipelineError, TableMismatch
from harvester.pipeline.formats import DeltaStore
from harvester.pipeline.lake.erase import erase
from harvester.pipeline.lake.recovery import LakeProgress, LogBounds, Loss, Recovery, followed, resolve
from harvester.pipeline.lake.silver import from_ddl
from harvester.pipeline.store import ErasedTable, TableStore
from harvester.pipeline.streaming import Manifest, TopicLog
from tests.support.harvested import KEPT, SENT_MS, Delivered, Sent, Writer
from tests.support.interruptions import CutOff
from tests.support.lakes import Lake, Oracle, assert_same
from tests.support.longs import long
from tests.support.wait import eventually

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.conftest import MakeTopic
    from tests.support.servers import Servers

ACCEPT, ADOPT = Recovery(accept_loss=True), Recovery(adopt=True)
BEGUN = {("a", 0): 10, ("a", 1): 20, ("b", 0): 5}
EARLIEST = {("a", 0): 0, ("a", 1): 0, ("b", 0): 0}
LATEST = {("a", 0): 15, ("a", 1): 25, ("b", 0): 9}


@pytest.mark.parametrize(
    ("earliest", "latest", "start", "lost"),
    [
        ({}, {}, {}, []),
        ({("a", 0): 10}, {}, {}, []),
        ({("a", 0): 12}, {}, {("a", 0): 12}, [Loss("a", 0, 10, 12)]),
        ({("a", 0): 15}, {}, {("a", 0): 15}, [Loss("a", 0, 10, 15)]),
        ({("a", 2): 0}, {("a", 2): 4}, {("a", 2): 0}, []),
        ({("a", 2): 3}, {("a", 2): 4}, {("a", 2): 3}, [Loss("a", 2, 0, 3)]),
        ({("new", 0): 3}, {("new", 0): 4}, {("new", 0): 3}, []),
    ],
)
def test_where_a_lake_goes_on_and_what_it_has_lost(
    earliest: dict[Any, int], latest: dict[Any, int], start: dict[Any, int], lost: list[Loss]
) -> None:
    log = LogBounds({**EARLIEST, **earliest}, {**LATEST, **latest})
    plan, found, unread = resolve(LakeProgress(7, BEGUN), log, ("a", "b", "new"))
    assert (plan.number, plan.start, plan.ends) == (7, {**BEGUN, **start}, None)
    assert (found, unread) == (lost, [])


def test_what_is_unread_of_a_retired_topic_and_of_one_that_is_gone() -> None:
    begun = {**BEGUN, ("gone", 0): 3}
    plan, lost, unread = resolve(LakeProgress(7, begun), LogBounds(EARLIEST, LATEST), ("a",))
    assert plan.start == {("a", 0): 10, ("a", 1): 20}
    assert (lost, unread) == ([], [Loss("b", 0, 5, 9), Loss("gone", 0, 3, None)])
    _, _, unread = resolve(LakeProgress(7, begun), LogBounds(EARLIEST, {**LATEST, ("b", 0): 5}), ("a",))
    assert unread == [Loss("gone", 0, 3, None)]


def test_a_batch_that_may_be_half_written_is_read_again_as_far_as_there_is_something() -> None:
    ends = {("a", 0): 14, ("a", 1): 20, ("b", 0): 8}
    log = LogBounds({**EARLIEST, ("a", 0): 12, ("b", 0): 9}, LATEST)
    plan, _, _ = resolve(LakeProgress(7, BEGUN, ends, since=6), log, ("a", "b"))
    assert plan.ends == {("a", 0): 14, ("a", 1): 20, ("b", 0): 9}
    assert plan.since == 6


def test_a_log_that_ends_before_it_was_read_may_have_any_record_that_a_table_has() -> None:
    plan, lost, _ = resolve(LakeProgress(7, BEGUN), LogBounds(EARLIEST, {**LATEST, ("a", 0): 3}), ("a", "b"))
    assert (plan.start, lost) == ({**BEGUN, ("a", 0): 0}, [Loss("a", 0, 10, None)])
    assert (plan.ends, plan.since) == ({**BEGUN, ("a", 0): 3}, 0)


OLD, NEW = {"a": "old", "b": "same"}, {"a": "new", "b": "same"}
LOGS = followed(None, OLD, -1)


def test_of_a_topic_that_was_made_anew_all_is_read_however_much_it_has() -> None:
    log = LogBounds({**EARLIEST, ("a", 1): 2, ("a", 2): 0}, {**LATEST, ("a", 2): 1}, NEW)
    plan, lost, unread = resolve(LakeProgress(7, BEGUN, {**BEGUN, ("a", 0): 14}, since=6, logs=LOGS), log, ("a", "b"))
    assert plan.start == {("a", 0): 0, ("a", 1): 2, ("a", 2): 0, ("b", 0): 5}
    assert plan.ends == plan.start, "of the new one no batch was begun"
    assert (lost, unread) == ([Loss("a", 0, 10, None), Loss("a", 1, 20, None)], [])
    _, lost, unread = resolve(
        LakeProgress(7, BEGUN, logs=LOGS), LogBounds(EARLIEST, {**LATEST, ("a", 1): 0}, NEW), ("b",)
    )
    assert (lost, unread) == ([], [Loss("a", 0, 10, None), Loss("a", 0, 0, 15), Loss("a", 1, 20, None)])
    assert not resolve(LakeProgress(7, BEGUN, logs=LOGS), LogBounds(EARLIEST, LATEST), ("a", "b"))[1], (
        "brokers without ids"
    )


def test_since_which_batch_the_rows_of_a_topic_are_of_the_one_there_is() -> None:
    read = Manifest("owner", "lake", ("a", "b"), "harvester")
    assert followed(read, OLD, 7) == LOGS, "what was read before its id was noted"
    noted = replace(read, logs=LOGS)
    assert followed(noted, {**NEW, "c": "added"}, 7) == {
        "a": TopicLog("new", 8), "b": TopicLog("same", 0), "c": TopicLog("added", 8)
    }  # fmt: skip
    retired = replace(noted, topics=("b",))
    assert followed(retired, {"b": "same"}, 9) == LOGS
    back = {**LOGS, "a": TopicLog("old", 0, returned=10)}
    assert followed(retired, OLD, 9) == back, "the log is the same, and lacks what was sent meanwhile until batch 10"
    assert followed(replace(noted, logs=back), OLD, 20) == back
    assert followed(retired, NEW, 9) == {**LOGS, "a": TopicLog("new", 10)}


def test_of_a_topic_that_returns_all_is_read_that_a_table_may_have() -> None:
    log = LogBounds({**EARLIEST, ("old", 0): 2}, {**LATEST, ("old", 0): 4}, {"a": "a", "old": "new"})
    for behind, gone in ((1, [Loss("old", 0, 1, 2)]), (2, []), (4, []), (5, [Loss("old", 0, 5, None)])):
        plan, lost, unread = resolve(LakeProgress(7, BEGUN), log, ("a", "b", "old"), {("old", 0): behind})
        assert (plan.start["old", 0], plan.ends, plan.since) == (2, {**BEGUN, ("old", 0): 4}, 0)
        assert (lost, unread) == (gone, []), "what Kafka removed while it was retired"
    plan, lost, _ = resolve(LakeProgress(7, BEGUN), log, ("a", "b", "old"), {("old", 1): 3})
    assert (plan.ends, lost) == ({**BEGUN, ("old", 0): 4}, []), "of this partition no table has a record"
    logs = {"old": TopicLog("old", 0)}
    plan, lost, unread = resolve(LakeProgress(7, BEGUN, logs=logs), log, ("a", "b", "old"), {("old", 0): 3})
    assert (plan.start["old", 0], plan.ends, plan.since, lost) == (2, None, None, []), "it is another one"
    assert unread == [Loss("old", 0, 3, None)], "nobody knows whether the first one had more"


def test_of_partitions_that_tables_have_nothing_of_nothing_is_known_to_be_lost() -> None:
    log = LogBounds({**EARLIEST, ("a", 2): 3}, {**LATEST, ("a", 2): 4})
    plan, lost, _ = resolve(LakeProgress(7, BEGUN, is_complete=False), log, ("a", "b"))
    assert (plan.start["a", 2], lost) == (3, [])


@pytest.fixture
def lake(spark: SparkSession, servers: Servers, tmp_path: Path) -> Lake:
    return Lake(spark, tmp_path / "lake", servers.bootstrap)


@pytest.fixture
def writer(servers: Servers) -> Writer:
    return Writer(servers.bootstrap)


@pytest.fixture
def admin(servers: Servers) -> AdminClient:
    return AdminClient({"bootstrap.servers": servers.bootstrap, "broker.address.family": "v4", "log_level": 3})


cut_off = CutOff()


def hooks() -> CutOff:
    """What HARVESTER_TEST_HOOKS names."""
    return cut_off


@pytest.fixture
def hooked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, f"{__name__}:hooks")


# A batch is cut off before one of these, or not at all. What it has written then, the next one is given by hand in
# test_batch_parts, every day for each of them.
INTERRUPTED = ["lake.silver", None, "lake.end", "lake.repeats", "lake.json"]


def records(first: int, last: int, partition: int = 0) -> list[Sent]:
    return [
        Sent(number, b"k-%d" % (number % 3), b'{"n": %d}' % number, partition=partition)
        for number in range(first, last)
    ]


def rows_of(lake: Lake, table: str) -> list[tuple[Any, ...]]:
    return sorted(tuple(row)[:4] for row in lake.rows(table))


def read(lake: Lake, topic: str, place: str | None) -> None:
    cut_off.place = place
    try:
        with suppress(HarvesterError):
            lake.once(topic, payloads={topic: from_ddl("n INT")})
    finally:
        cut_off.place = None


def batches(writer: Writer, lake: Lake, topic: str, interrupted: str | None) -> tuple[list[Delivered], list[Delivered]]:
    """A batch that the lake has, and one with repeats and rejects that may have been cut off.

    The last of its repeats is of a record of its own.
    """
    first = writer.send(topic, [*records(1, 11), *records(11, 15, partition=1)])
    read(lake, topic, None)
    again = [one.again(1) for one in records(3, 6)]
    strange = [Sent(0, headers=(), partition=0), Sent(40, b"k-1", b"[", partition=0)]
    own = records(21, 25)
    second = writer.send(topic, [*again, *own, *strange, *records(25, 31), own[0].again(1)])
    read(lake, topic, interrupted)
    return first, second


def assert_whole(lake: Lake, topic: str, oracle: Oracle) -> None:
    """What does not fit the columns is in rejects, once."""
    lake.assert_holds(oracle)
    columns = [number for _, number in oracle.silver if number != 40]
    assert_same(columns, [row["id"] for row in lake.rows(f"json/{topic}", "id")])
    bad = [row for row in lake.rows("rejects", "reason", "value") if row["reason"] == "bad payload"]
    assert len(bad) == len(oracle.silver) - len(columns)


@long  # test_formats goes on without removed records every day
@pytest.mark.usefixtures("hooked")
@pytest.mark.parametrize("interrupted", INTERRUPTED)
def test_records_that_were_removed_before_they_were_read(
    lake: Lake, writer: Writer, admin: AdminClient, make_topic: MakeTopic, interrupted: str | None
) -> None:
    """What a batch that was cut off has written stays, whether Kafka still has it or not, and each record is once."""
    topic, oracle, lake.folds = make_topic(2, KEPT), Oracle(), interrupted is None
    first, second = batches(writer, lake, topic, interrupted)
    later = writer.send(topic, records(41, 51))
    cut = later[4].offset if interrupted is None else second[5].offset
    admin.delete_records([TopicPartition(topic, 0, cut)])[TopicPartition(topic, 0)].result(30)
    if interrupted == "lake.end":
        assert lake.once(topic, payloads={topic: from_ddl("n INT")}) == len(later)
    else:
        begun, before = (later if interrupted is None else second)[0].offset, lake.versions()
        with pytest.raises(InputMissing, match=rf"{topic}\[0\] from offset {begun} to before {cut}") as caught:
            lake.once(topic, payloads={topic: from_ddl("n INT")})
        assert "--accept-loss" in str(caught.value.hint)
        assert lake.versions() == before
        told: list[str] = []
        lake.once(topic, payloads={topic: from_ddl("n INT")}, recovery=ACCEPT, say=told.append)
        assert told[:1] == [f"accepted as lost: {topic}[0] from offset {begun} to before {cut}"]
        assert rows_of(lake, "losses") == [(topic, 0, begun, cut)]

    repeats = [*second[:3], second[-1]]
    written = {"lake.repeats": second[3:-1], "lake.silver": [*repeats, second[7]]}.get(interrupted or "", second)
    kept = [one for one in [*second, *later] if one in written or one.offset >= cut]
    oracle.take([*first, *kept])
    again = writer.send(topic, [one.sent.again(9) for one in [*first[:3], *kept] if one.sent.named])
    oracle.take(again)
    assert lake.once(topic, payloads={topic: from_ddl("n INT")}, recovery=ACCEPT) == len(again)
    assert_whole(lake, topic, oracle)


@pytest.mark.parametrize("returns", [False, pytest.param(True, marks=long)])
def test_a_topic_that_is_gone_or_not_wanted_any_more_is_retired(
    lake: Lake, writer: Writer, admin: AdminClient, make_topic: MakeTopic, returns: bool
) -> None:
    kept, unwanted, gone, oracle = make_topic(1, KEPT), make_topic(1, KEPT), make_topic(1, KEPT), Oracle()
    lake.folds = False
    for number, topic in enumerate((kept, unwanted, gone)):
        oracle.take(writer.send(topic, records(10 * number + 1, 10 * number + 6)))
    lake.once(kept, unwanted, gone)
    oracle.take(writer.send(kept, records(41, 44)))
    unread = writer.send(unwanted, [*records(51, 54), Sent(0, headers=(), partition=0)])
    admin.delete_topics([gone])[gone].result(30)
    # Its deletion takes the broker a moment.
    eventually(lambda: gone not in admin.list_topics(timeout=10).topics, 30, f"{gone} is gone")
    before = lake.versions()
    with pytest.raises(InputMissing, match=f"no topic {gone}") as caught:
        lake.once(kept, unwanted, gone)
    assert "--retire-topic" in str(caught.value.hint)
    with pytest.raises(CheckpointMismatch, match=f"without {unwanted}, {gone}") as refused:
        lake.once(kept)
    assert "--retire-topic" in str(refused.value.hint)
    with pytest.raises(CheckpointMismatch, match=rf"{unwanted}\[0\] from offset 5 to before 9"):
        lake.once(kept, recovery=Recovery(retire=(unwanted, gone)))
    with pytest.raises(CheckpointMismatch, match="the lake does not read other"):
        lake.once(kept, unwanted, recovery=Recovery(retire=("other",)))
    assert lake.versions() == before

    assert lake.once(kept, unwanted, recovery=Recovery(retire=(gone,))) == 3 + len(unread)
    oracle.take(unread)
    assert rows_of(lake, "losses") == [(gone, 0, 5, None)]
    assert lake.once(kept, recovery=Recovery(retire=(unwanted,))) == 0
    oracle.take(again := writer.send(kept, [one.again(3) for one in records(41, 44)]))
    assert lake.once(kept) == len(again)
    assert len(rows_of(lake, "losses")) == 1, "all of the other one had been read"
    lake.assert_holds(oracle)
    if not returns:
        return

    # Named again, it is read again, and nothing of it is written once more.
    oracle.take(more := writer.send(unwanted, records(61, 63)))
    lake.once(kept, unwanted)
    oracle.take(again := writer.send(unwanted, [one.again(4) for one in (*records(51, 53), more[0].sent)]))
    assert lake.once(kept, unwanted) == len(again)
    lake.assert_holds(oracle)

    # Made anew meanwhile, it is read whole, although its records have the places and the times of others.
    lake.once(kept, recovery=Recovery(retire=(unwanted,)))
    make_anew(admin, unwanted)
    oracle.take(anew := Writer(lake.bootstrap).send(unwanted, records(71, 80)))
    assert lake.once(kept, unwanted) == len(anew)
    lake.assert_holds(oracle)
    assert sorted(rows_of(lake, "losses")) == sorted([(gone, 0, 5, None), (unwanted, 0, 15, None)])


@long  # test_formats loses a checkpoint every day, and test_an_adoption_that_was_cut_off… one more
@pytest.mark.usefixtures("hooked")
@pytest.mark.parametrize("interrupted", INTERRUPTED)
def test_a_lost_checkpoint_is_made_anew_from_the_tables(
    lake: Lake, writer: Writer, make_topic: MakeTopic, interrupted: str | None
) -> None:
    """Also where only a part of it is lost, one after the other."""
    topic, oracle, lake.folds = make_topic(2, KEPT), Oracle(), interrupted is None
    oracle.take([one for sent in batches(writer, lake, topic, interrupted) for one in sent])
    checkpoint, payloads = lake.root / "checkpoint", {topic: from_ddl("n INT")}
    shutil.copytree(checkpoint, old := lake.root.parent / "old")
    with pytest.raises(CheckpointMismatch, match="is not lost"):
        lake.once(topic, payloads=payloads, recovery=ADOPT)
    for number, lost in enumerate(("manifest", "offsets", "all") if interrupted is None else ("all",)):
        if lost == "all":
            shutil.rmtree(checkpoint)
        elif lost == "manifest":
            (checkpoint / "harvester.json").write_text("{")
        else:
            shutil.rmtree(checkpoint / "offsets")
            shutil.rmtree(checkpoint / "commits")
            (checkpoint / "metadata").unlink()
        before = lake.versions()
        with pytest.raises((CheckpointMismatch, TableMismatch)) as caught:
            lake.once(topic, payloads=payloads)
        assert "--adopt" in str(caught.value.hint)
        assert lake.versions() == before
        old_ones = [one.again(5 + number) for one in records(1, 51) if not 15 <= one.id < 21]
        oracle.take(writer.send(topic, [*old_ones, *records(60 + 5 * number, 65 + 5 * number)]))
        told: list[str] = []
        lake.once(topic, payloads=payloads, recovery=ADOPT, say=told.append)
        assert (f"what is left of the checkpoint is in {checkpoint}." in "".join(told)) == (lost != "all")
    oracle.take(again := writer.send(topic, [one.again(9) for one in records(1, 11)]))
    assert lake.once(topic, payloads=payloads) == len(again)
    assert_whole(lake, topic, oracle)
    assert lake.table("losses").isEmpty()
    with pytest.raises(TableMismatch, match="another checkpoint"):
        lake.once(topic, checkpoint=str(old))


@long  # test_where_a_lake_goes_on_and_what_it_has_lost decides that
def test_a_checkpoint_that_is_older_than_its_tables_is_refused(
    lake: Lake, writer: Writer, make_topic: MakeTopic
) -> None:
    """Its batches would bear numbers that the tables have, and write nothing. One without offsets, and an old copy."""
    topic, oracle, lake.folds = make_topic(1, KEPT), Oracle(), False
    checkpoint, copy = lake.root / "checkpoint", lake.root.parent / "copy"
    for number in (10, 20):
        oracle.take(writer.send(topic, records(number, number + 5)))
        lake.once(topic)
        if not copy.exists():
            shutil.copytree(checkpoint, copy)
    oracle.take(writer.send(topic, records(40, 45)))
    before = lake.versions()
    for lost, known in ((checkpoint / "offsets", "knows of no batch"), (checkpoint, "ends with batch 0")):
        shutil.rmtree(lost)
        if lost == checkpoint:
            copy.rename(checkpoint)
        with pytest.raises(CheckpointMismatch, match=f"older than its tables: it {known}, .* have batch 1") as caught:
            lake.once(topic)
        assert "--adopt" in str(caught.value.hint)
    assert lake.versions() == before
    assert lake.once(topic, recovery=ADOPT) == 5 + 5
    lake.assert_holds(oracle)


@long
def test_an_adopted_lake_gives_no_number_again_that_counts_as_folded(
    lake: Lake, writer: Writer, make_topic: MakeTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that the last batch has written was erased since; files of earlier versions do not matter here."""

    def deleted(store: DeltaStore, _name: str, _where: str, statement: str) -> ErasedTable:
        return ErasedTable(store.spark.sql(statement).collect()[0][0], 0, None)

    monkeypatch.setattr(DeltaStore, "erase", deleted)
    topic, oracle = make_topic(1, KEPT), Oracle()
    for number, key in enumerate((b"a", b"b")):
        oracle.take(writer.send(topic, [Sent(number, key, partition=0)]))
        lake.once(topic)
    erase(lake.spark, str(lake.root), b"b")
    shutil.rmtree(lake.root / "checkpoint")
    oracle.take(writer.send(topic, [Sent(2, b"c", partition=0)]))
    told: list[str] = []
    lake.once(topic, recovery=ADOPT, say=told.append)
    lake.assert_holds(oracle)
    assert any("erase them again" in line for line in told)


@long
def test_who_names_a_topic_again_is_told_that_erased_records_come_back(
    lake: Lake, writer: Writer, make_topic: MakeTopic
) -> None:
    kept, other = make_topic(1, KEPT), make_topic(1, KEPT)
    for number, topic in enumerate((kept, other)):
        writer.send(topic, [Sent(number, b"k%d" % number, partition=0)])
    lake.once(kept, other)
    erase(lake.spark, str(lake.root), b"k1")
    told: list[str] = []
    lake.once(kept, recovery=Recovery(retire=(other,)), say=told.append)
    assert not any("erase them again" in line for line in told)
    lake.once(kept, other, say=told.append)
    assert any("erase them again" in line for line in told)
    assert sum(lake.store.table(name).count() for name in ("silver", "repeats")) == 2


def make_anew(admin: AdminClient, topic: str) -> None:
    admin.delete_topics([topic])[topic].result(30)
    eventually(lambda: topic not in admin.list_topics(timeout=10).topics, 30, f"{topic} is gone")
    admin.create_topics([NewTopic(topic, 1, 1, config=KEPT)])[topic].result(30)


@long
def test_a_topic_that_was_made_anew_is_read_from_its_beginning_once(
    lake: Lake, writer: Writer, admin: AdminClient, make_topic: MakeTopic
) -> None:
    """It may have fewer records than were read of the old one, or more; later the checkpoint is lost."""
    topic, oracle, anew = make_topic(1, KEPT), Oracle(), writer
    oracle.take(writer.send(topic, records(1, 6)))
    lake.once(topic)
    for read, first, last in ((5, 11, 13), (2, 21, 30)):
        make_anew(admin, topic)
        anew = Writer(lake.bootstrap)
        oracle.take(anew.send(topic, records(first, last)))
        before = lake.versions()
        with pytest.raises(
            InputMissing, match=rf"{topic}\[0\] from offset {read} on; {topic} was deleted and recreated"
        ):
            lake.once(topic)
        assert lake.versions() == before
        assert lake.once(topic, recovery=ACCEPT) == last - first
    shutil.rmtree(lake.root / "checkpoint")
    oracle.take(anew.send(topic, records(31, 33)))
    assert lake.once(topic, recovery=Recovery(accept_loss=True, adopt=True)) == 2
    oracle.take(anew.send(topic, [one.again(1) for one in records(21, 23)]))
    assert lake.once(topic) == 2
    lake.assert_holds(oracle)
    assert rows_of(lake, "losses") == [(topic, 0, 2, None), (topic, 0, 5, None)]

    # And both at once.
    shutil.rmtree(lake.root / "checkpoint")
    make_anew(admin, topic)
    oracle.take(Writer(lake.bootstrap).send(topic, records(41, 61)))
    with pytest.raises(InputMissing, match="recreated"):
        lake.once(topic, recovery=ADOPT)
    lake.once(topic, recovery=Recovery(accept_loss=True, adopt=True))
    lake.assert_holds(oracle)


@long  # test_of_a_topic_that_was_made_anew_all_is_read_however_much_it_has decides what follows
def test_a_topic_that_is_made_anew_while_the_lake_reads_it_ends_the_job(
    lake: Lake, writer: Writer, admin: AdminClient, make_topic: MakeTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, oracle, lake.folds = make_topic(1, KEPT), Oracle(), False
    oracle.take(writer.send(topic, records(1, 6)))
    lake.once(topic)
    stream, written = source.stream, list[Delivered]()

    def late(*args: Any) -> Any:
        make_anew(admin, topic)
        written.extend(Writer(lake.bootstrap).send(topic, records(11, 21)))
        return stream(*args)

    earlier = [(topic, 0, 5, None, datetime(2000, 1, 1, tzinfo=UTC))]  # of another log that ended there
    lake.store.append(lake.spark.createDataFrame(earlier, schemas.LOSSES), "losses")
    before = lake.versions()
    with monkeypatch.context() as patched:
        patched.setattr(source, "stream", late)
        with pytest.raises(InputMissing, match=r"from offset 5 on; .* recreated"):
            lake.once(topic)
    assert lake.versions() == before
    oracle.take(written)
    lake.once(topic, recovery=ACCEPT)
    lake.assert_holds(oracle)
    [(is_late,)] = lake.table("losses").selectExpr("accepted_at > DATE'2001-01-01'").collect()
    assert is_late, "both count as one, the later"


@long  # test_formats adopts every day
def test_an_adoption_that_was_cut_off_is_finished_by_the_next_start(
    lake: Lake, writer: Writer, make_topic: MakeTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, oracle = make_topic(1, KEPT), Oracle()
    oracle.take(writer.send(topic, records(1, 6)))
    lake.once(topic)
    shutil.rmtree(lake.root / "checkpoint")
    with monkeypatch.context() as patched:
        patched.setattr("harvester.pipeline.streaming.go_on", cut_short)
        with pytest.raises(PipelineError):
            lake.once(topic, recovery=ADOPT)
    oracle.take(writer.send(topic, records(4, 9)))
    assert lake.once(topic) == 5
    lake.assert_holds(oracle)


def test_a_new_lake_that_was_cut_off_before_its_tables_begins_where_it_was_told_to(
    lake: Lake, writer: Writer, make_topic: MakeTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, oracle = make_topic(1, KEPT), Oracle()
    lake.folds = lake.is_prepared = False
    writer.send(topic, records(1, 6))
    oracle.take(writer.send(topic, [one.again(2) for one in records(6, 9)]))
    with monkeypatch.context() as patched:
        patched.setattr(TableStore, "prepare", cut_short)
        with pytest.raises(PipelineError):
            lake.once(topic, recovery=Recovery(start_at=datetime.fromtimestamp(SENT_MS / 1000 + 3600, UTC)))
    assert lake.once(topic) == 3
    lake.assert_holds(oracle)


def cut_short(*_: Any) -> None:
    raise OSError("no more")


def test_a_new_lake_starts_at_a_time_and_no_other_does(lake: Lake, writer: Writer, make_topic: MakeTopic) -> None:
    topic, oracle = make_topic(2, KEPT), Oracle()
    lake.folds = lake.is_prepared = False
    writer.send(topic, records(1, 6))
    oracle.take(writer.send(topic, [one.again(2) for one in records(6, 9)]))
    at = datetime.fromtimestamp(SENT_MS / 1000 + 3600, UTC)
    assert lake.once(topic, recovery=Recovery(start_at=at)) == 3
    oracle.take(writer.send(topic, [*records(9, 12), *records(12, 14, partition=1)]))
    with pytest.raises(CheckpointMismatch, match="has begun") as caught:
        lake.once(topic, recovery=Recovery(start_at=at))
    assert "--start-at" in str(caught.value.hint)
    assert lake.once(topic) == 5
    lake.assert_holds(oracle)


@long  # test_records_that_kafka_removed_before_they_were_read_end_the_job
def test_a_topic_that_is_added_may_have_lost_its_beginning(
    lake: Lake, writer: Writer, admin: AdminClient, make_topic: MakeTopic
) -> None:
    topic, old, oracle, lake.folds = make_topic(1, KEPT), make_topic(1, KEPT), Oracle(), False
    oracle.take(writer.send(topic, records(1, 4)))
    lake.once(topic)
    sent = writer.send(old, records(4, 10))
    admin.delete_records([TopicPartition(old, 0, 3)])[TopicPartition(old, 0)].result(30)
    assert lake.once(topic, old) == 3
    oracle.take(sent[3:])
    lake.assert_holds(oracle)
    assert lake.table("losses").isEmpty()


@pytest.mark.usefixtures("hooked")
@pytest.mark.parametrize("interrupted", [None, "lake.silver"])
@long  # test_columns_that_are_asked_for_after_a_first_batch_that_was_cut_off fills some in every day
def test_columns_that_are_asked_for_later_are_filled_in_from_silver(
    lake: Lake, writer: Writer, make_topic: MakeTopic, interrupted: str | None
) -> None:
    """Of a topic whose values nobody wanted so far, of one with fewer columns, and of runs that left them out."""
    topic, oracle, lake.folds = make_topic(1, KEPT), Oracle(), False
    values = [Sent(number, b"k", b'{"n": %d, "who": "x"}' % number, partition=0) for number in range(20)]
    oracle.take(writer.send(topic, [*values[:5], Sent(40, b"k-1", b"[", partition=0), values[0].again(1)]))
    lake.once(topic)
    told: list[str] = []

    def read(ddl: str | None, sent: list[Sent], place: str | None = None) -> dict[int, Any]:
        oracle.take(writer.send(topic, sent))
        told.clear()
        cut_off.place = place
        try:
            with suppress(HarvesterError):
                lake.once(topic, payloads={topic: from_ddl(ddl)} if ddl else {}, say=told.append)
        finally:
            cut_off.place = None
        rows = lake.rows(f"json/{topic}", "id", "data")
        data = {row["id"]: row["data"].asDict() for row in rows}
        assert len(data) == len(rows)
        return data

    def expected(last: int, *columns: str) -> dict[int, Any]:
        return {number: {"n": number, **dict.fromkeys(columns, "x")} for number in range(last)}

    filling = [f"filling in json/{topic} from silver"]
    assert read("n INT", values[5:7]) == expected(7)
    assert told == filling
    assert read("n INT", values[7:9]) == expected(9)
    assert told == []
    read("n INT", values[9:11], place=interrupted)
    assert read("n INT, who STRING", values[11:13]) == expected(13, "who")
    assert told == filling
    assert read(None, values[13:15]) == expected(13, "who")
    assert read("n INT, who STRING", values[15:17]) == expected(17, "who")
    assert told == filling
    assert_whole(lake, topic, oracle)


@long  # test_lake_typed has columns that are added later
@pytest.mark.usefixtures("hooked")
def test_columns_that_are_asked_for_after_a_first_batch_that_was_cut_off(
    lake: Lake, writer: Writer, make_topic: MakeTopic
) -> None:
    """Silver has no record of the topic then, but the table of its values has, since all tables are written at once."""
    topic, oracle, lake.folds = make_topic(1, KEPT), Oracle(), False
    oracle.take(writer.send(topic, records(1, 6)))
    read(lake, topic, "lake.silver")
    assert lake.table("silver").isEmpty()
    assert len(lake.rows(f"json/{topic}")) == 5
    lake.once(topic, payloads={topic: from_ddl("n INT, who STRING")})
    assert_whole(lake, topic, oracle)
