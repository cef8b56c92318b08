"""Recovers a lake that cannot continue: lost records, retired topics, a lost checkpoint; also starts a new lake.

All these cases are one: the stream is to continue at offsets of our choice. `resolve` decides them, as a pure function
of the lake's progress and the brokers' logs, and they are written ahead as the manifest's `Plan`.

The checkpoint records the progress. If it is lost, the tables yield it: after the highest offsets of all batches but
the last. The last batch may have been interrupted between its tables, like a batch that the checkpoint records as
begun. Its offsets cannot be read again as the same batch, which would have to find the same records. So it is abandoned
as it is, and the next batch reads up to its end, without the records that a table has.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import reduce

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for it

from harvester.pipeline import schemas, source, streaming, tables
from harvester.pipeline.errors import CheckpointMismatch, InputMissing, PipelineError
from harvester.pipeline.lake.batch import batch_name, done_again, ids_file, to_do_again
from harvester.pipeline.lake.cuts import Offsets
from harvester.pipeline.lake.silver import local
from harvester.pipeline.source import Place
from harvester.pipeline.store import TableStore
from harvester.pipeline.streaming import Manifest, Plan, TopicLog


@dataclass(frozen=True, slots=True)
class Recovery:
    """What the user permits: losing records, dropping topics, a new checkpoint. `start_at`: the start of a new lake."""

    accept_loss: bool = False
    retire: tuple[str, ...] = ()
    adopt: bool = False
    start_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class LakeProgress:
    """The progress of a lake: after batch `number`, at `begun`.

    `ends`: if that batch may be half written, how far it may have got; then batches from `since` on have rows of
    records after `begun`. `is_complete`: it lists all partitions of each topic, so that others begin at 0.
    `is_committed`: Spark has recorded that the batch is done. `logs`: the logs of the offsets, as far as known.
    """

    number: int
    begun: Mapping[Place, int]
    ends: Mapping[Place, int] | None = None
    since: int | None = None
    is_complete: bool = True
    is_committed: bool = True
    logs: Mapping[str, TopicLog] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Loss:
    """Offsets that were never read; `end` None: the topic no longer exists, or was recreated."""

    topic: str
    partition: int
    first: int
    end: int | None

    def __str__(self) -> str:
        to = "on" if self.end is None else f"to before {self.end}"
        return f"{self.topic}[{self.partition}] from offset {self.first} {to}"


@dataclass(frozen=True, slots=True)
class LogBounds:
    """The beginnings and ends of all existing partitions. A topic without any does not exist.

    `ids`: Kafka's ids of the topics.
    """

    earliest: Mapping[Place, int]
    latest: Mapping[Place, int]
    ids: Mapping[str, str] = field(default_factory=dict)


def made_anew(logs: Mapping[str, TopicLog], ids: Mapping[str, str]) -> set[str]:
    """The topics that were recreated since they were read."""
    return {topic for topic, log in logs.items() if ids.get(topic, log.id) != log.id}


def resolve(
    progress: LakeProgress, log: LogBounds, topics: Collection[str], returning: Offsets | None = None
) -> tuple[Plan, list[Loss], list[Loss]]:
    """The plan, the records of `topics` that were removed before they were read, and the unread records of others.

    Tables contain records of `returning` topics from before their retirement. Which ones is unknown, so any may exist;
    `returning` has the offsets behind the last ones. How much a log had that was recreated meanwhile is unknown, too.
    """
    returning = returning or {}
    returned = {topic for topic, _ in returning}
    known = {topic for topic, _ in progress.begun} if progress.is_complete else set()
    other = made_anew(progress.logs, log.ids)
    start = {}
    lost: list[Loss] = []
    unread: list[Loss] = []
    ends, since = dict(progress.ends or {}), progress.since
    for place, earliest in log.earliest.items():
        topic, latest = place[0], log.latest[place]
        begun = progress.begun.get(place, 0 if topic in known | other else earliest)
        if topic in other:
            if place in progress.begun or place in ends:
                (lost if topic in topics else unread).append(Loss(*place, begun, None))
            elif place in returning:
                unread.append(Loss(*place, returning[place], None))
            begun = earliest
            ends.pop(place, None)
        if topic not in topics:
            if begun < latest:
                unread.append(Loss(*place, begun, latest))
            continue
        if begun < earliest:
            lost.append(Loss(*place, begun, earliest))
        elif begun > latest:
            # The brokers have lost the end of the log, or its id is unknown: any record may be in a table.
            lost.append(Loss(*place, begun, None))
            ends[place], since = latest, 0
        elif topic in returned and topic not in other:
            behind = returning.get(place, earliest)
            if not earliest <= behind <= latest:
                lost.append(Loss(*place, behind, earliest if behind < earliest else None))
            ends[place], since = latest, 0
        start[place] = begun if earliest <= begun <= latest else earliest
    for place, begun in progress.begun.items():
        if place not in log.earliest:
            (lost if place[0] in topics else unread).append(Loss(*place, begun, None))
    if since is None:
        return Plan(progress.number, start), lost, unread
    again = {one: max(offset, min(ends.get(one, offset), log.latest[one])) for one, offset in start.items()}
    return Plan(progress.number, start, again, since), lost, unread


def followed(stored: Manifest | None, ids: Mapping[str, str], behind: int) -> dict[str, TopicLog]:
    """The logs to read after batch `behind`, and those of retired topics, which may return.

    One that returns is read again, and its earlier rows stay; but no earlier batch has what came while it was retired.
    A log that was read before its id was noted is assumed to be the same.
    """
    logs = {} if stored is None else {one: log for one, log in stored.logs.items() if one not in stored.topics}
    for topic, named in ids.items():
        before = stored.logs.get(topic) if stored is not None else None
        was_read = stored is not None and topic in stored.topics
        if before is not None and before.id == named:
            logs[topic] = before if was_read else replace(before, returned=behind + 1)
        else:
            logs[topic] = TopicLog(named, 0 if before is None and was_read else behind + 1)
    return logs


def claim(
    store: TableStore,
    where: str,
    kafka: Mapping[str, str],
    wanted: Manifest,
    chosen: Recovery,
    say: Callable[[str], None] = lambda _: None,
) -> Manifest:
    """Claims the checkpoint `where` for the tables; `wanted` contains the owner's name for a new one.

    The caller must fill in those of its `payloads` that the returned manifest lacks.

    Raises CheckpointMismatch, TableMismatch, InputMissing, without changing anything, unless the lake can continue with
    what the user permits.
    """
    spark = store.spark
    owner = store.properties("silver").get(tables.OWNER) if store.exists("silver") else None
    stored, used, broken = _examined(store, where, owner)
    progress: LakeProgress | None = None
    if chosen.adopt:
        _require_lost(spark, where, stored, owner, broken)
        progress, stored = _of_tables(store, wanted)
    elif broken is not None:
        raise broken
    else:
        streaming.require_table(store, where, "silver", used=used)
        if stored is not None and stored.job == wanted.job:
            progress = _of_checkpoint(spark, where)
    if strange := [topic for topic in chosen.retire if stored is None or topic not in stored.topics]:
        raise CheckpointMismatch(f"the lake does not read {', '.join(strange)}", hint="omit --retire-topic")
    if chosen.start_at is not None and progress is not None:
        raise CheckpointMismatch(f"the lake in {store.root} has begun, and continues where it is", hint=_NOT_NEW)
    left = stored and replace(stored, topics=tuple(one for one in stored.topics if one not in chosen.retire))
    decided = streaming.decide(left, replace(wanted, payloads={}), where, used=used)
    plan: Plan | None = None
    with source.admin(spark, kafka, "offsets") as brokers:
        ids = brokers.ids(wanted.topics)
        if progress is not None:
            late = any(decided.payloads.get(topic) != columns for topic, columns in wanted.payloads.items())
            log = _log(brokers, [*wanted.topics, *chosen.retire])
            progress = replace(progress, logs=decided.logs)
            added = set(wanted.topics) - set(left.topics) if left is not None and not chosen.adopt else ()
            returning = _returning(store, added, decided.logs)
            plan = _resolved(store, progress, log, decided, chosen, returning, late=late, say=say)
        elif chosen.start_at is not None:
            places = brokers.places(wanted.topics)
            plan = Plan(0, brokers.since(places, chosen.start_at, brokers.latest(places)))
    if chosen.adopt:
        _set_aside(store, where, say)
    # All is read again of a topic that was retired, and of a log that has lost its end.
    known = stored.logs.keys() - stored.topics if stored is not None else set()
    again = not known.isdisjoint(wanted.topics) or (plan is not None and plan.since == 0)
    if (chosen.adopt or again) and not _is_empty(store, schemas.ERASURES_TABLE.name):
        say("keys were erased from this lake: erase them again, because their records in Kafka may be read again")
    if plan is not None:
        plan = replace(plan, adopts=owner if chosen.adopt else None)
    decided = replace(decided, plan=plan, logs=followed(left, ids, -1 if progress is None else progress.number))
    if decided != stored:
        streaming.store(spark, where, decided)
    return _carried_out(store, where, decided)


def note(store: TableStore, where: str, manifest: Manifest) -> None:
    """Records on silver the logs of its rows, and for a schema the checkpoint's location, found nowhere else."""
    known, wanted = store.properties("silver"), {tables.TOPICS: streaming.logs_to_text(manifest.logs)}
    if not manifest.logs:
        wanted = {}
    if store.is_catalog:
        wanted[tables.CHECKPOINT] = where
    for name, value in wanted.items():
        if known.get(name) != value:
            store.set_property("silver", name, value)


def require_unread(spark: SparkSession, where: str, kafka: Mapping[str, str], manifest: Manifest) -> None:
    """Raises InputMissing if records with which the checkpoint continues have been removed."""
    progress = _of_checkpoint(spark, where)
    if progress is not None:
        with source.admin(spark, kafka, "offsets") as brokers:
            log = _log(brokers, manifest.topics)
        _, lost, _ = resolve(replace(progress, logs=manifest.logs), log, manifest.topics)
        if lost:
            raise _overtaken(lost, made_anew(manifest.logs, log.ids))


def require_same(
    spark: SparkSession, kafka: Mapping[str, str], manifest: Manifest, *, with_ends: bool = False
) -> dict[Place, int]:
    """Raises InputMissing if a topic was recreated: the records just read may be from the new one.

    Returns the high watermarks of all partitions, or, without `with_ends`, nothing.
    """
    if not manifest.logs and not with_ends:
        return {}
    with source.admin(spark, kafka, "topics") as brokers:
        ids = brokers.ids(manifest.topics)
        if other := made_anew(manifest.logs, ids):
            raise _overtaken([], other)
        if not with_ends:
            return {}
        # A deleted topic stops the stream soon.
        return brokers.latest(brokers.places([topic for topic in manifest.topics if topic in ids or not manifest.logs]))


def require_idle(spark: SparkSession, where: str, owner: str | None) -> None:
    """Raises CheckpointMismatch unless this is the checkpoint of these tables, with no batch to be repeated."""
    stored, _ = streaming.examine(spark, where)
    if stored is None or stored.owner != owner:
        raise CheckpointMismatch(
            f"there is no checkpoint of these tables in {where}",
            hint="specify it with --checkpoint; if it is lost, `lake --adopt` creates a new one",
        )
    progress = _of_checkpoint(spark, where)
    if stored.plan is not None or (progress is not None and not (progress.is_committed and progress.ends is None)):
        raise CheckpointMismatch(
            "a batch of the lake is in progress, or was interrupted and will be repeated",
            hint="stop the lake's job; `lake --once` completes the batch",
        )


_NOT_NEW = "--start-at is only for a new lake"
_ADOPT = "create a new one from the tables with --adopt, or restore it and the tables to the same point in time"


def _examined(store: TableStore, where: str, owner: str | None) -> tuple[Manifest | None, bool, PipelineError | None]:
    """The manifest, whether Spark has written there, and why it does not fit the `owner`'s tables, if it does not.

    First carries out what an earlier start has written ahead.
    """
    try:
        stored, used = streaming.examine(store.spark, where)
        if stored is not None and stored.plan is not None:
            stored, used = _carried_out(store, where, stored), True
            owner = stored.owner
        if stored is not None and used:
            _of_checkpoint(store.spark, where)
    except CheckpointMismatch as error:
        return None, True, error if owner is None else CheckpointMismatch(error.message, hint=_ADOPT)
    broken: PipelineError | None = None
    if owner is None:
        pass
    elif stored is None and used:
        broken = CheckpointMismatch(f"{where} is the checkpoint of something else", hint=_ADOPT)
    elif stored is None or stored.owner != owner:
        broken = store.filled_by_another("silver")
    else:
        broken = streaming.outrun(store, where, _written(store), owner, _ADOPT)
        # Rebuilt tables have no batch numbers.
        if broken is None and streaming.last_begun(store.spark, where) is None and not _is_empty(store, "silver"):
            broken = CheckpointMismatch(f"the checkpoint {where} has lost the lake's progress", hint=_ADOPT)
    return stored, used, broken


def _written(store: TableStore) -> list[str]:
    """The tables to which batches write."""
    return ["silver", "repeats", "rejects", "incarnations", *store.values()]


def _is_empty(store: TableStore, name: str) -> bool:
    return not store.exists(name) or store.table(name).isEmpty()


def _of_checkpoint(spark: SparkSession, where: str) -> LakeProgress | None:
    """The progress that a checkpoint records; None if no batch was begun. Raises CheckpointMismatch if unreadable."""
    number = streaming.last_begun(spark, where)
    if number is None:
        return None
    ends = _planned(spark, where, number)
    is_committed = str(number) in tables.listing(spark, f"{where}/commits")
    if is_committed or tables.read_text(spark, ids_file(where, number)):
        return LakeProgress(number, ends, is_committed=is_committed)
    again = done_again(tables.read_text(spark, ids_file(where, number - 1)))
    since = number if again is None else again
    if number:
        return LakeProgress(number, _planned(spark, where, number - 1), ends, since)
    return LakeProgress(number, streaming.first_begins(spark, where), ends, since)


def _planned(spark: SparkSession, where: str, number: int) -> Mapping[Place, int]:
    found = streaming.planned(spark, where, number)
    if found is None:
        raise CheckpointMismatch(f"the checkpoint {where} does not say where batch {number} ends")
    return found


def _require_lost(
    spark: SparkSession, where: str, stored: Manifest | None, owner: str | None, broken: PipelineError | None
) -> None:
    """Raises CheckpointMismatch if there are no tables to adopt, or their checkpoint is not lost."""
    if owner is None:
        raise CheckpointMismatch("there are no tables of a lake to adopt", hint="specify their directory")
    if broken is None:
        raise CheckpointMismatch(f"the checkpoint {where} is not lost", hint="continue without --adopt")
    if stored is not None and stored.owner != owner and tables.listing(spark, f"{where}/offsets"):
        raise CheckpointMismatch(
            f"the checkpoint {where} belongs to other tables", hint="specify another directory with --checkpoint"
        )


def _set_aside(store: TableStore, where: str, say: Callable[[str], None]) -> None:
    """Moves the rest of the old checkpoint away."""
    if tables.listing(store.spark, where):
        aside = f"{where}.{uuid.uuid4().hex[:8]}"
        tables.move(store.spark, where, aside)
        say(f"what is left of the checkpoint is in {aside} now")


def _of_tables(store: TableStore, wanted: Manifest) -> tuple[LakeProgress, Manifest]:
    """The progress that the tables record, and a manifest for them."""
    noted = store.properties("silver")
    store.prepare(schemas.TABLES, noted[tables.OWNER], noted.get(tables.HEADER))
    folded = store.properties("current").get(tables.FOLDED)
    rows = _places(store)
    logs = streaming.logs_from_text(noted.get(tables.TOPICS))
    # Batches may have written no rows, or rows that were erased since. Numbers are never reused: rows with a used one
    # would count as folded, or as part of a log that no longer exists.
    numbers = [log.read_since - 1 for log in logs.values()]
    numbers.append(store.last_written(_written(store), noted[tables.OWNER]) or 0)
    named = [rows.agg(F.max("batch")).collect()[0][0], folded, batch_name(max(0, *numbers))]
    last = max(filter(None, named))
    # All batches before a folded one are complete.
    given_up = noted.get(tables.AGAIN, last)
    since = min(last, given_up if folded is None or folded <= given_up else last)
    since = None if folded is not None and folded >= last else since
    behind = F.col("batch") < (since or batch_name(int(last) + 1))
    here = _of_log(logs)
    found = rows.groupBy("topic", "partition").agg(
        F.max(F.when(here, F.col("offset"))).alias("last"),
        F.max(F.when(here & behind, F.col("offset"))).alias("whole"),
    )
    begun, ends, topics = {}, {}, set[str]()
    for topic, partition, end, whole in found.collect():
        topics.add(topic)
        if end is not None:
            ends[topic, partition] = end + 1
        if whole is not None:
            begun[topic, partition] = whole + 1
    progress = LakeProgress(int(last), begun, is_complete=False)
    if since is not None:
        progress = replace(progress, ends=ends, since=int(since))
    header = noted.get(tables.HEADER, wanted.header)
    return progress, replace(wanted, topics=tuple(sorted(topics)), header=header, logs=logs)


def _returning(store: TableStore, topics: Collection[str], logs: Mapping[str, TopicLog]) -> dict[Place, int]:
    """The offsets behind those of these topics of which tables have records: they were retired earlier."""
    if not topics:
        return {}
    rows = _places(store).where(F.col("topic").isin(*topics) & _of_log(logs))
    found = rows.groupBy("topic", "partition").agg(F.max("offset")).collect()
    return {(topic, partition): last + 1 for topic, partition, last in found}


def _of_log(logs: Mapping[str, TopicLog]) -> Column:
    """Of `_places`: whether a row is of the log that its topic had last."""
    first = F.when(F.col("topic").isNull(), batch_name(0))
    for topic, log in logs.items():
        first = first.when(F.col("topic") == topic, batch_name(log.since))
    # Rows without a batch are from values that were filled in; silver has them, too.
    return F.coalesce("batch", F.lit(batch_name(0))) >= F.coalesce(first, F.lit(batch_name(0)))


def _places(store: TableStore) -> DataFrame:
    """(topic, partition, offset, batch) of every record in the tables."""
    every = (store.table(name) for name in ("silver", "repeats", "rejects"))
    return reduce(DataFrame.unionByName, (rows.select("topic", "partition", "offset", "batch") for rows in every))


def _log(brokers: source.TopicAdmin, topics: Iterable[str]) -> LogBounds:
    there = brokers.names()
    places = brokers.places([topic for topic in dict.fromkeys(topics) if topic in there])
    return LogBounds(brokers.earliest(places), brokers.latest(places), brokers.ids({topic for topic, _ in places}))


def _resolved(
    store: TableStore,
    progress: LakeProgress,
    log: LogBounds,
    decided: Manifest,
    chosen: Recovery,
    returning: Offsets,
    *,
    late: bool,
    say: Callable[[str], None],
) -> Plan | None:
    """The plan, if one is needed; records losses. `late`: tables are to be filled in."""
    plan, lost, unread = resolve(progress, log, decided.topics, returning)
    if lost and not chosen.accept_loss:
        raise _overtaken(lost, made_anew(progress.logs, log.ids))
    if (there := [one for one in unread if one.end is not None]) and not chosen.accept_loss:
        raise CheckpointMismatch(
            f"topics to be retired have unread records: {_listed(there)}",
            hint="read them first with --topic and --once, or add --accept-loss",
        )
    # Spark mistakes it for a loss if an added topic does not begin at 0. It would repeat a batch that is complete, and
    # that Kafka may no longer have. A table that is filled in cannot contain half of a batch.
    added = any(offset > 0 and place not in progress.begun for place, offset in plan.start.items())
    changed = late if progress.ends else not progress.is_committed
    if not (chosen.adopt or chosen.retire or lost or added or changed or returning):
        return None
    for one in (losses := [*lost, *unread]):
        say(f"accepted as lost: {one}")
    if losses:
        table = schemas.LOSSES_TABLE
        store.prepare([table], store.properties("silver").get(tables.OWNER), decided.header)
        rows = [
            {"topic": one.topic, "partition": one.partition, "first_offset": one.first, "end_offset": one.end}
            for one in losses
        ]
        local(
            store.spark, rows, "topic string, partition int, first_offset bigint, end_offset bigint"
        ).createOrReplaceTempView(_NEW)
        store.change(schemas.merge_losses(store.at(table.name), _NEW))
        store.spark.catalog.dropTempView(_NEW)
    return plan


_NEW = "harvester_losses"


def _overtaken(lost: list[Loss], other: Collection[str]) -> InputMissing:
    of_which = [_listed(lost)] if lost else []
    of_which += [f"{topic} was deleted and recreated" for topic in sorted(other)]
    return InputMissing(
        f"Kafka no longer has what the lake would read next: {'; '.join(of_which)}",
        hint="--accept-loss continues with what is left, and records the loss in the table `losses`",
    )


def _listed(losses: list[Loss]) -> str:
    return ", ".join(map(str, losses[:_TOLD])) + (f" and {len(losses) - _TOLD} more" if len(losses) > _TOLD else "")


_TOLD = 5


def _carried_out(store: TableStore, where: str, manifest: Manifest) -> Manifest:
    """Carries out the manifest's plan. Idempotent."""
    plan = manifest.plan
    if plan is None:
        return manifest
    if plan.adopts is None:
        # A checkpoint with offsets but without tables is refused, so a new lake's tables come first.
        store.prepare(schemas.TABLES, manifest.owner, manifest.header)
    else:
        for name in dict.fromkeys([*(table.name for table in schemas.TABLES), *_written(store)]):
            if store.exists(name) and store.properties(name).get(tables.OWNER) == plan.adopts:
                store.set_property(name, tables.OWNER, manifest.owner)
    if plan.since is not None:
        store.set_property("silver", tables.AGAIN, batch_name(plan.since))
        tables.write_text(store.spark, ids_file(where, plan.number), to_do_again(plan.since))
    streaming.go_on(store.spark, where, plan)
    # Silver has what the abandoned batch has not written to tables of values.
    done = replace(manifest, plan=None, payloads={} if plan.since is not None or plan.adopts else manifest.payloads)
    streaming.store(store.spark, where, done)
    return done
