"""Moves slices: a transaction selects the rows, and Spark tasks read them and write them to Kafka.

The transaction exports its snapshot to the tasks, and stays open until the rows are purged. While it is open the outbox
cannot be truncated, so an id means the same row when it is read, sent and purged.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from uuid import UUID

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient, ConfigResource, ResourceType
from pyspark.sql import DataFrame, SparkSession

from harvester.bounds import SILENT
from harvester.config import Config
from harvester.delivery.decode import Broken, Decoded, decode
from harvester.delivery.retries import backoff_s
from harvester.errors import BrokerUnavailable, OutboxError, TermLost
from harvester.outbox.connection import OutboxIdentity, connect, database_errors, read_place, sequence_oid
from harvester.outbox.libpq import copy_rows
from harvester.outbox.schema import inspect
from harvester.outbox.shape import OutboxShape
from harvester.outbox.tables import OutboxTable
from harvester.pipeline.drain import slices, sql
from harvester.pipeline.drain.slices import DrainRules, Share, Stamp, Times, TopicLimits, sink_options, sink_rows
from harvester.pipeline.jdbc import jdbc_source
from harvester.pipeline.session import clear_errors

_SILENCE_S = 300.0
_DOUBTFUL_RECORDS = 1_000


@dataclass(frozen=True, slots=True)
class SliceRows:
    """The rows of a slice: all rows from the first to the last id, in this snapshot."""

    ids: list[int]
    shares: list[Share]
    snapshot: str
    left: int  # after them, at most
    shifted: bool = False  # a header array's lower bound is not 1

    @property
    def headers(self) -> tuple[int, int]:
        """The fewest and the most of a row."""
        return min(share.headers[0] for share in self.shares), max(share.headers[1] for share in self.shares)

    @property
    def bytes(self) -> int:
        return sum(share.bytes for share in self.shares)

    @property
    def largest_bytes(self) -> int:
        return max(share.largest_bytes for share in self.shares)


class Snapshot:
    """The transaction of one slice at a time, on its own connection. A context manager.

    Raises DatabaseUnavailable, SchemaError, TermLost.
    """

    def __init__(self, dsn: str, table: OutboxTable, place: OutboxIdentity | None) -> None:
        self._dsn, self._table, self._place = dsn, table, place
        self._file: int | None = None

    def __enter__(self) -> Snapshot:
        self._connection = connect(self._dsn, application_name="harvester drain/slice", silence_s=_SILENCE_S)
        try:
            with database_errors("read the outbox"):
                self.shape: OutboxShape = inspect(self._connection, self._table)
                place = read_place(self._connection, self._table, sequence_oid(self.shape.sequence))
            if self._place is not None and (reason := place.why_not(self._place)) is not None:
                raise TermLost(f"the database has changed: {reason}")
        except BaseException:
            self._connection.close()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        self._connection.close()

    def choose(self, limit: int, most_bytes: int, term: int, holder: UUID) -> SliceRows | None:
        """Begins a slice of at most `limit` records and, approximately, `most_bytes`; None if there are no rows."""
        with database_errors("select rows of the outbox"):
            self.end()
            self._connection.execute(sql.BEGIN)
            self._connection.execute(sql.SETTINGS)
            chosen = self._read(limit)
            while chosen is not None and chosen.bytes > 2 * most_bytes and len(chosen.ids) > 1:
                chosen = self._read(max(1, len(chosen.ids) * most_bytes // chosen.bytes))
            self._check(term, holder)
        return chosen

    def doubtful(
        self, ids: tuple[int, int], shares: list[tuple[Share, TopicLimits | None]], rules: DrainRules
    ) -> list[tuple[Decoded, int | None]]:
        """The first rows of these shares within `ids` that may be poison, each with its value's number of bytes."""
        query = sql.doubtful(self._table, self.shape, ids, shares, rules, _DOUBTFUL_RECORDS)
        with database_errors("inspect rows of the outbox"):
            rows = copy_rows(self._connection, query, _SILENCE_S)
        found: list[tuple[Decoded, int | None]] = []
        for record in decode(b"".join(raw for _, _, raw in rows)):
            value = None if isinstance(record, Broken) else record.value
            found.append((record, None if value is None else int(value)))
        return found

    def end(self) -> None:
        """Ends the transaction."""
        with database_errors("end a slice"):
            self._connection.rollback()

    def _read(self, limit: int) -> SliceRows | None:
        rows = self._connection.execute(sql.choose(self._table, self.shape, limit), binary=True).fetchall()
        if not rows:
            return None
        snapshot = self._connection.execute("SELECT pg_export_snapshot()").fetchone()
        highest = self._connection.execute(f"SELECT max(id) FROM {self._table.sql}").fetchone()
        assert snapshot is not None
        assert highest is not None
        ids = sorted(number for row in rows for number in row[10])
        shares = []
        for topic, records, size, largest, low, high, fewest, most, odd, *_ in rows:
            places = None if low is None else (low, high)
            shares.append(Share(topic, records, size, largest, places, (fewest, most), odd))
        return SliceRows(ids, shares, snapshot[0], highest[0] - ids[-1], any(row[9] for row in rows))

    def _check(self, term: int, holder: UUID) -> None:
        row = self._connection.execute(sql.standing(self._table, self.shape)).fetchone()
        if row is None or (row[0], row[1]) != (term, holder):
            raise TermLost(f"term {term} of this drain has ended: another process has taken it")
        file = row[2]
        if self._file is not None and file != self._file:
            raise OutboxError("the ids of the outbox have started again", hint="start the drain again")
        self._file = file


_TIMEOUT_S = 10.0
_DEFAULT_BYTES = 1_048_588  # the brokers' default, if the topic's configuration may not be read
_LIMIT = "max.message.bytes"


class Topics:
    """Looks up topics at the brokers, missing ones as often as the relay would."""

    def __init__(self, config: Config) -> None:
        options, self._limits = config.common_options(), config.limits
        self._servers = options.get("bootstrap.servers", "")
        self._admin = AdminClient({**options, **SILENT})

    def look(self, names: Collection[str]) -> dict[str, TopicLimits]:
        """The existing ones of these topics. Raises BrokerUnavailable.

        Requesting a topic by name creates it if brokers create topics automatically, as producing to it would.
        """
        if not names:
            return {}
        try:
            counts = self._partitions(None)
            first_s, longest_s = (
                one.total_seconds() for one in (self._limits.retry_backoff, self._limits.retry_backoff_max)
            )
            for attempt in range(1, self._limits.max_attempts + 1):
                missing = [name for name in names if name not in counts]
                if not missing:
                    break
                if attempt > 1:
                    time.sleep(backoff_s(attempt - 1, first_s, longest_s, 0.5))
                for name in missing:
                    counts |= self._partitions(name)
            found = {name: counts[name] for name in names if name in counts}
            limits = self._most_bytes(list(found))
        except (KafkaException, TimeoutError) as error:
            text = error.args[0].str() if isinstance(error, KafkaException) else "no answer"
            raise BrokerUnavailable(f"Kafka at {self._servers} did not list its topics: {text}") from error
        return {name: TopicLimits(count, limits.get(name, _DEFAULT_BYTES)) for name, count in found.items()}

    def _partitions(self, topic: str | None) -> dict[str, int]:
        known = self._admin.list_topics(**({} if topic is None else {"topic": topic}), timeout=_TIMEOUT_S).topics
        return {name: len(one.partitions) for name, one in known.items() if one.error is None and one.partitions}

    def _most_bytes(self, names: list[str]) -> dict[str, int]:
        if not names:
            return {}
        resources = [ConfigResource(ResourceType.TOPIC, name) for name in names]
        found = {}
        for resource, future in self._admin.describe_configs(resources, request_timeout=_TIMEOUT_S).items():
            try:
                found[str(resource.name)] = int(future.result(_TIMEOUT_S)[_LIMIT].value)
            except KafkaException as error:
                if error.args[0].code() in {KafkaError._TRANSPORT, KafkaError._TIMED_OUT}:
                    raise
        return found


_GROUP = "harvester drain"
_TOLD_S, _LOOK_S = 5.0, 0.01
_NEVER_MS = 9_999_999_999_999
_NO_IDS = (1, 0)
_ANY_LIMITS = (1 << 20, 1 << 20)


class SliceWriter:
    """Reads and sends slices, with `tasks` tasks, by default one per core. Raises PipelineError."""

    def __init__(
        self, spark: SparkSession, config: Config, kafka: Mapping[str, str], durations: Times, tasks: int | None
    ) -> None:
        self._config, self._kafka, self._times = config, kafka, durations
        self._context = spark.sparkContext
        self._session = spark.newSession()
        self._session.conf.set("spark.sql.ansi.enabled", "false")  # numbers are sent as their bytes
        self._tasks = tasks or self._context.defaultParallelism
        self._source = jdbc_source(config.dsn)

    def start(self, shape: OutboxShape) -> None:
        """Sends a slice without rows, so that warm-up and errors come before the lease runs."""
        rows = self._read(shape, _NO_IDS, 1, {"fetchsize": "1"})
        stamp = Stamp(self._config.record_header, UUID(int=0), 0, 0)
        with clear_errors("a trial run without rows failed"):
            self._save(sink_rows(rows, stamp, (1, 1), _NEVER_MS), _ANY_LIMITS)

    def write(
        self, shape: OutboxShape, chosen: SliceRows, stamp: Stamp, deadline_ms: int, limits: tuple[int, int]
    ) -> None:
        """Sends these rows; returns when all are acknowledged. `limits`: as for `sink_options`."""
        self._context.setJobGroup(_GROUP, "a slice of the outbox", interruptOnCancel=True)  # for this thread
        more = {
            "fetchsize": str(slices.fetch_records(chosen.largest_bytes)),
            "sessionInitStatement": sql.same_snapshot(chosen.snapshot),
        }
        with clear_errors("the slice was not written"):
            ids = chosen.ids[0], chosen.ids[-1]
            rows = self._read(shape, ids, chosen.headers[1], more, shifted=chosen.shifted)
            self._save(sink_rows(rows, stamp, chosen.headers, deadline_ms), limits)

    def has_repeated(self) -> bool:
        """Whether a task of the last slice failed and was repeated: its producer, which Spark keeps, may still send.

        True also if Spark does not say.
        """
        tracker, deadline = self._context.statusTracker(), time.monotonic() + _TOLD_S
        number = max(tracker.getJobIdsForGroup(_GROUP), default=-1)
        while (job := tracker.getJobInfo(number)) is None or job.status == "RUNNING":  # Spark counts after the fact
            if time.monotonic() >= deadline:
                return True
            time.sleep(_LOOK_S)
        stages = [tracker.getStageInfo(one) for one in job.stageIds]
        return any(one is None or one.numFailedTasks > 0 for one in stages)

    def cancel(self) -> None:
        """Cancels the running tasks, as far as they can be reached."""
        from py4j.protocol import Py4JError

        with suppress(Py4JError, OSError, EOFError):
            self._context.cancelJobGroup(_GROUP)

    def _read(
        self, shape: OutboxShape, ids: tuple[int, int], headers: int, more: Mapping[str, str], *, shifted: bool = False
    ) -> DataFrame:
        table = sql.read(self._config.table, shape, ids, headers, self._tasks, shifted=shifted)
        # A negative threshold makes the driver transfer bytea in binary instead of as text.
        properties = {**self._source.options, "prepareThreshold": "-1", **more}
        url = properties.pop("url")
        parts = [f"bucket = {bucket:d} ORDER BY id" for bucket in range(self._tasks)]  # what follows WHERE
        with clear_errors("the outbox cannot be read"):
            return self._session.read.jdbc(url, table, predicates=parts, properties=properties)

    def _save(self, rows: DataFrame, limits: tuple[int, int]) -> None:
        options = sink_options(self._kafka, self._times, limits)
        rows.write.format("kafka").options(**options).mode("append").save()
