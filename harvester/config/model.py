"""The configuration: every setting with its type and default, the rules between settings, and derived values.

Constructing a `Config` raises ConfigurationError with all problems. Defaults that depend on other settings are filled
in, so it holds effective values only; `model_fields_set` contains the given ones. It can be pickled, and everything
that prints it masks secrets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from harvester.claim_check.reference import FORM as STORE_FORM
from harvester.claim_check.reference import StoreSettings
from harvester.config import kafka_options, timing
from harvester.config.dsn import effective_dsn, mask_dsn
from harvester.config.durations import format_duration, to_ms
from harvester.config.fields import (
    DataSource,
    Duration,
    Endpoint,
    FunctionName,
    GroupId,
    HeaderName,
    ListenAddress,
    Name,
    Region,
    Retention,
    SessionDuration,
    SocketPath,
    StoreUrl,
    Switch,
    TableName,
    Topic,
    TopicOrNone,
    default_group_id,
    default_name,
    one_of,
    whole_number,
)
from harvester.config.kafka_options import CONSUMER_ONLY, client_id, mask_options, merge, without
from harvester.config.oauth import TokenHook, hook_problems
from harvester.config.problems import SettingsTable, nested, refuse, refuse_all
from harvester.errors import Problem
from harvester.origin import HEADER
from harvester.outbox.tables import OutboxTable

DEFAULT_BOOTSTRAP = "localhost:9092"
DEFAULT_DATA_SOURCE = "host=localhost port=5432 user=postgres password= dbname=postgres sslmode=disable"
LEADER_TOPIC_SUFFIX = ".neli"
PROGRESS_TOPIC_SUFFIX = ".progress"
WORTHWHILE_SHARDS_PER_CORE = 4  # more cost memory and sessions without moving more
# Limits with a different default in exactly-once mode.
TRANSACTIONS = {"max_in_flight_records": 10_000, "mark_query_records": 1_000}
# librdkafka's `log_level`: syslog severities
_LOG_LEVELS = {"trace": "7", "debug": "7", "info": "6", "warning": "4", "error": "3"}
_MAX_PROPAGATION = timedelta(seconds=1)
_MIN_TRANSACTION_MS = 10_000
_MIN_PRODUCER_QUEUE_RECORDS = 100_000
_MESSAGE_BYTES = 1_000_000  # librdkafka's default of message.max.bytes
AROUND_A_RECORD = 1_024  # the harvester's header, a trace's, and the protocol's overhead


def derived(source: str, compute: Any) -> Any:
    """A default computed from preceding settings; `source` describes this to users.

    Pydantic skips it if one of those settings is invalid.
    """
    return Field(default_factory=compute, description=source)


class Limits(SettingsTable):
    """Times and amounts; docs/configuration.md explains how they depend on each other."""

    min_poll_interval: Duration = timedelta(milliseconds=100)
    heartbeat_timeout: Duration = timedelta(seconds=3)
    session_timeout: SessionDuration = derived(
        "2 x heartbeat_timeout, or 3s more than it",
        lambda given: timing.default_session_timeout(given["heartbeat_timeout"]),
    )
    queue_timeout: Duration = timedelta(seconds=30)
    drain_interval: Duration = derived(
        "session_timeout - heartbeat_timeout - 500ms, at most queue_timeout",
        lambda given: timing.default_drain_interval(
            given["session_timeout"], given["heartbeat_timeout"], given["queue_timeout"]
        ),
    )
    mark_backoff: Duration = timedelta(milliseconds=10)
    mark_backoff_max: Duration = timedelta(milliseconds=100)
    io_error_backoff: Duration = timedelta(milliseconds=500)
    head_scan_interval: Duration = timedelta(minutes=1)
    max_in_flight_records: Annotated[int, whole_number(1, 1_000_000)] = 1000
    shards: Annotated[int, whole_number(1, 256)] = 8
    records_per_shard: Annotated[int, whole_number(0, 1_000_000)] = 200
    send_buffer: Annotated[int, whole_number(1, 100_000)] = 10
    max_queued_per_key: Annotated[int, whole_number(1, 1_000_000)] = 100
    max_attempts: Annotated[int, whole_number(1, 1_000_000)] = 5
    max_transaction_records: Annotated[int, whole_number(1, 50_000)] = 5_000
    mark_query_records: Annotated[int, whole_number(1, 100_000)] = 100
    min_metrics_interval: Duration = timedelta(seconds=5)
    retry_backoff: Duration = timedelta(milliseconds=100)
    retry_backoff_max: Duration = timedelta(seconds=10)
    restart_budget: Annotated[int, whole_number(0, 10_000)] = 5
    restart_window: Duration = timedelta(seconds=60)


class PoisonSettings(SettingsTable):
    """What to do with a record that Kafka refuses; see docs/dead-letters.md."""

    policy: Annotated[Literal["quarantine", "hold", "stop"], one_of("quarantine", "hold", "stop")] = "quarantine"
    notice_topic: TopicOrNone = ""


class OversizeSettings(SettingsTable):
    """Quarantines records too large for Kafka, or stores their values."""

    policy: Annotated[Literal["quarantine", "claim-check"], one_of("quarantine", "claim-check")] = "quarantine"
    above: Annotated[int, whole_number(0, 1 << 30)] = 0
    store: StoreUrl = ""
    s3_endpoint: Endpoint = ""
    s3_region: Region = ""

    @property
    def store_settings(self) -> StoreSettings | None:
        """The store, if one is configured."""
        return StoreSettings(self.store, self.s3_endpoint, self.s3_region) if self.store else None


class Logging(SettingsTable):
    """What is logged."""

    level: Annotated[str, one_of(*_LOG_LEVELS)] = "info"


class Http(SettingsTable):
    """What is served over HTTP; see docs/operations.md."""

    listen: ListenAddress = "off"


class Control(SettingsTable):
    """How a running harvester is controlled; see docs/operations.md."""

    socket: SocketPath = "auto"


class Tracing(SettingsTable):
    """Whether traces are continued through records; see docs/operations.md."""

    enabled: Switch = False


class OAuth(SettingsTable):
    """The source of tokens for Kafka (SASL OAUTHBEARER); see docs/security.md."""

    token: FunctionName = ""


def _order_problems(limits: Limits) -> list[Problem]:
    """A backoff must not start above its maximum."""
    found = []
    for low, high in (("mark_backoff", "mark_backoff_max"), ("retry_backoff", "retry_backoff_max")):
        least, most = getattr(limits, low), getattr(limits, high)
        if least > most:
            text = f"is {format_duration(most)}, below {low} ({format_duration(least)})"
            found.append(Problem(f"limits.{high}", text, f"at least {format_duration(least)}"))
    return found


def _linger_problems(producer_options: Mapping[str, str], delivery_timeout: timedelta) -> list[Problem]:
    """Lingering must leave time to deliver."""
    linger = kafka_options.get(producer_options, "linger.ms")
    try:
        too_long = linger is not None and float(linger) >= to_ms(delivery_timeout)
    except ValueError:
        too_long = False  # `harvester config check` has librdkafka check values
    if not too_long or delivery_timeout < timing.MIN_DELIVERY_TIMEOUT:
        return []
    path = kafka_options.option_path("producer_kafka_config", "linger.ms")
    return [Problem(path, "is not shorter than the delivery timeout", f"below {to_ms(delivery_timeout)}")]


def _notice_problems(notice_topic: str, leader_topic: str) -> list[Problem]:
    """Notices must not go to the topic from which group members read heartbeats."""
    if notice_topic != leader_topic:
        return []
    return [Problem("poison.notice_topic", "is the leader topic, which is for heartbeats only", "another topic")]


def _oversize_problems(oversize: OversizeSettings, largest: int) -> list[Problem]:
    """What is stored needs a store, and what is not must fit the producer."""
    if oversize.policy != "claim-check":
        return []
    found = []
    if not oversize.store:
        found.append(Problem("oversize.store", 'is not set, but oversize.policy is "claim-check"', STORE_FORM))
    if oversize.above > largest:
        text = f"is {oversize.above}, but the producer's message.max.bytes leaves room for {largest}"
        found.append(Problem("oversize.above", text, f"at most {largest}, or 0 for that"))
    return found


def _kafka_table(name: kafka_options.Table) -> BeforeValidator:
    def read(value: object) -> dict[str, str]:
        if not isinstance(value, Mapping):
            refuse(f"must be a table ([{name}])")
        options, problems = kafka_options.read_options(value, name)
        if problems:
            refuse_all(problems)
        if name == "base_kafka_config" and kafka_options.get(options, "bootstrap.servers") is None:
            options = {"bootstrap.servers": DEFAULT_BOOTSTRAP} | options
        return options

    return BeforeValidator(read)


class Config(SettingsTable):
    """Everything a harvester needs to know. Immutable; safe to pass to another process."""

    base_kafka_config: Annotated[dict[str, str], _kafka_table("base_kafka_config")] = Field(default_factory=dict)
    producer_kafka_config: Annotated[dict[str, str], _kafka_table("producer_kafka_config")] = Field(
        default_factory=dict
    )
    leader_group_id: GroupId = Field(default_factory=default_group_id, description="the main script's name")
    leader_topic: Topic = derived(
        "leader_group_id + .neli", lambda given: given["leader_group_id"] + LEADER_TOPIC_SUFFIX
    )
    data_source: DataSource = DEFAULT_DATA_SOURCE
    outbox_table: TableName = "outbox"
    name: Name = Field(default_factory=default_name, description="host, process and start time")
    delivery: Annotated[Literal["at-least-once", "exactly-once"], one_of("at-least-once", "exactly-once")] = (
        "at-least-once"
    )
    record_header: HeaderName = HEADER
    record_timestamp: Annotated[Literal["produce", "create_time"], one_of("produce", "create_time")] = "produce"
    marking: Annotated[Literal["memory", "table"], one_of("memory", "table")] = "memory"
    archive: Annotated[Literal["off", "ids", "rows"], one_of("off", "ids", "rows")] = "off"
    archive_retention: Retention = timedelta(days=7)
    limits: Annotated[Limits, nested(Limits, "limits")] = Field(default_factory=Limits)
    oversize: Annotated[OversizeSettings, nested(OversizeSettings, "oversize")] = OversizeSettings()
    poison: Annotated[PoisonSettings, nested(PoisonSettings, "poison")] = PoisonSettings()
    logging: Annotated[Logging, nested(Logging, "logging")] = Logging()
    http: Annotated[Http, nested(Http, "http")] = Http()
    tracing: Annotated[Tracing, nested(Tracing, "tracing")] = Tracing()
    control: Annotated[Control, nested(Control, "control")] = Control()
    oauth: Annotated[OAuth, nested(OAuth, "oauth")] = OAuth()

    if TYPE_CHECKING:  # accepts more types than are read: tables as mappings, durations as texts

        def __init__(
            self,
            *,
            base_kafka_config: Mapping[str, object] = ...,
            producer_kafka_config: Mapping[str, object] = ...,
            leader_group_id: str = ...,
            leader_topic: str = ...,
            data_source: str = ...,
            outbox_table: str = ...,
            name: str = ...,
            delivery: Literal["at-least-once", "exactly-once"] = ...,
            record_header: str = ...,
            record_timestamp: Literal["produce", "create_time"] = ...,
            marking: Literal["memory", "table"] = ...,
            archive: Literal["off", "ids", "rows"] = ...,
            archive_retention: timedelta | str = ...,
            limits: Limits | Mapping[str, object] = ...,
            oversize: OversizeSettings | Mapping[str, object] = ...,
            poison: PoisonSettings | Mapping[str, object] = ...,
            logging: Logging | Mapping[str, object] = ...,
            http: Http | Mapping[str, object] = ...,
            tracing: Tracing | Mapping[str, object] = ...,
            control: Control | Mapping[str, object] = ...,
            oauth: OAuth | Mapping[str, object] = ...,
        ) -> None: ...

    @model_validator(mode="before")
    @classmethod
    def _bounds_of_transactions(cls, data: Any) -> Any:
        """Records wait for their transaction, and none is repeated after a crash, so more of them may be under way."""
        if not isinstance(data, Mapping) or data.get("delivery") != "exactly-once":
            return data
        limits = data.get("limits", {})
        if isinstance(limits, Limits):
            limits = {name: getattr(limits, name) for name in limits.model_fields_set}
        return {**data, "limits": {**TRANSACTIONS, **limits}} if isinstance(limits, Mapping) else data

    @model_validator(mode="after")
    def _check_relations(self) -> Config:
        problems = [
            *self.timing.problems(),
            *_order_problems(self.limits),
            *_linger_problems(self.producer_kafka_config, self.delivery_timeout),
            *_notice_problems(self.poison.notice_topic, self.leader_topic),
            *hook_problems(self.oauth.token, self.base_kafka_config),
            *_oversize_problems(self.oversize, self.largest_record_bytes),
        ]
        if problems:
            refuse_all(problems)
        return self

    @property
    def delivery_timeout(self) -> timedelta:
        """D: how long a produced record may wait for its acknowledgement."""
        given = kafka_options.get(self.producer_kafka_config, "delivery.timeout.ms")
        if given is not None:
            return timedelta(milliseconds=int(given))
        limits = self.limits
        return timing.default_delivery_timeout(limits.session_timeout, limits.heartbeat_timeout, limits.drain_interval)

    @property
    def group_heartbeat_interval(self) -> timedelta:
        """g: how often the Kafka client proves to the group that it is alive."""
        return timing.group_heartbeat_interval(self.limits.session_timeout)

    @property
    def rebalance_timeout(self) -> timedelta:
        """R: how long the group waits for a member in a rebalance; Kafka's `max.poll.interval.ms`."""
        given = kafka_options.get(self.base_kafka_config, "max.poll.interval.ms")
        if given is not None:
            return timedelta(milliseconds=int(given))
        limits = self.limits
        return timing.default_rebalance_timeout(
            limits.session_timeout, limits.heartbeat_timeout, limits.min_poll_interval, limits.drain_interval
        )

    @property
    def join_wait(self) -> timedelta:
        """How long a new member waits before it joins: for as long as a dead one could hold the group back beyond what
        the leader's last commit proves its place (P39).
        """
        limits = self.limits
        beat = timing.heartbeat_interval(limits.heartbeat_timeout, limits.min_poll_interval)
        return self.delivery_timeout + timing.SCAN_INTERVAL + beat + timing.CLIENT_TICK

    @property
    def timing(self) -> timing.Timing:
        """The effective values of the limits that depend on each other."""
        limits = self.limits
        return timing.Timing(
            heartbeat_timeout=limits.heartbeat_timeout,
            session_timeout=limits.session_timeout,
            min_poll_interval=limits.min_poll_interval,
            drain_interval=limits.drain_interval,
            delivery_timeout=self.delivery_timeout,
            delivery_given=kafka_options.get(self.producer_kafka_config, "delivery.timeout.ms") is not None,
            rebalance_timeout=self.rebalance_timeout,
        )

    @property
    def table(self) -> OutboxTable:
        """The names of the outbox and its companion tables."""
        return OutboxTable.parse(self.outbox_table)

    @property
    def dsn(self) -> str:
        """The DSN for connections: `data_source`, limited to writable servers, with this instance's application
        name.
        """
        return effective_dsn(self.data_source, application_name=f"harvester {self.name}")

    @property
    def message_max_bytes(self) -> int:
        """The producer's limit on a record, as configured or by default."""
        tables = (self.producer_kafka_config, self.base_kafka_config)
        limit = next(filter(None, (kafka_options.get(table, "message.max.bytes") for table in tables)), "")
        # librdkafka rejects values that are not numbers in `harvester config check`.
        return int(limit) if limit.isdecimal() else _MESSAGE_BYTES

    @property
    def largest_record_bytes(self) -> int:
        """The most bytes that key, value and headers of a row may have together, given `message_max_bytes`."""
        return max(1, self.message_max_bytes - AROUND_A_RECORD)

    @property
    def progress_topic(self) -> str:
        """Where lanes record what they have committed (exactly-once mode)."""
        return self.leader_group_id + PROGRESS_TOPIC_SUFFIX

    # Options of each kind of client: the user's, between the harvester's defaults and what it enforces. All values are
    # text; typed Any, because some of the client's signatures ask for a wider type.

    def common_options(self) -> dict[str, Any]:
        """Options of the admin client and of the election's producer; a consumer has more: `consumer_options`."""
        return merge(self._client_defaults(), without(self.base_kafka_config, CONSUMER_ONLY))

    def producer_options(self) -> dict[str, Any]:
        """Options of a shard's producer, including enforced ones."""
        defaults = {
            # Batches grow while the previous ones are under way, not by waiting: because of the barrier every key waits
            # for its acknowledgement, so each millisecond would be felt. More simultaneous requests would be smaller.
            "linger.ms": "0",
            "max.in.flight.requests.per.connection": "2",
            # An unknown topic must not hold a record for longer than its lifetime.
            "topic.metadata.propagation.max.ms": str(to_ms(min(self.delivery_timeout / 2, _MAX_PROPAGATION))),
            # The harvester limits in-flight records: the client's own queue must never be the limit.
            "queue.buffering.max.messages": str(
                max(2 * self.limits.max_in_flight_records, _MIN_PRODUCER_QUEUE_RECORDS)
            ),
            "queue.buffering.max.kbytes": "1048576",
        }
        return self._producer_options(defaults)

    def lane_options(self) -> dict[str, Any]:
        """Options of a shard's transactional producer in exactly-once mode, without the lane's own id."""
        # A transaction flushes what it has sent when it ends, so no record waits for as long as this.
        defaults = {"linger.ms": "20", "max.in.flight.requests.per.connection": "5"}
        # A transaction outlives what it sends, but not by much.
        timeout_ms = max(_MIN_TRANSACTION_MS, 2 * to_ms(self.delivery_timeout))
        return merge(
            self.producer_options(), self._producer_options(defaults), {"transaction.timeout.ms": str(timeout_ms)}
        )

    def consumer_options(self) -> dict[str, Any]:
        """Options of the leader group's member, including enforced ones: the classic protocol, cooperative."""
        limits = self.limits
        defaults = {"fetch.wait.max.ms": str(max(1, to_ms(limits.min_poll_interval)))}
        guards = {
            "group.id": self.leader_group_id,
            "group.protocol": "classic",
            "partition.assignment.strategy": "cooperative-sticky",
            "enable.auto.commit": "false",
            "auto.offset.reset": "latest",
            "session.timeout.ms": str(to_ms(limits.session_timeout)),
            "heartbeat.interval.ms": str(to_ms(self.group_heartbeat_interval)),
            "max.poll.interval.ms": str(to_ms(self.rebalance_timeout)),
            "allow.auto.create.topics": "false",
        }
        return merge(self._client_defaults(), defaults, self.base_kafka_config, guards)

    def _producer_options(self, defaults: Mapping[str, str]) -> dict[str, str]:
        # delivery.report.only.error is refused in the tables and false by default: every record is reported.
        guards = {
            "acks": "all",
            "enable.idempotence": "true",
            "partitioner": "murmur2_random",
            "delivery.timeout.ms": str(to_ms(self.delivery_timeout)),
        }
        base = without(self.base_kafka_config, CONSUMER_ONLY)
        return merge(self._client_defaults(), defaults, base, self.producer_kafka_config, guards)

    def _client_defaults(self) -> dict[str, str]:
        return {
            "client.id": client_id(self.name),
            "log_level": _LOG_LEVELS[self.logging.level],
            "socket.nagle.disable": "true",
            **({"oauth_cb": TokenHook.of(self.oauth.token)} if self.oauth.token else {}),
        }

    def masked(self) -> dict[str, Any]:
        """All settings as plain values for printing: durations as text, secrets masked."""
        shown: dict[str, Any] = self.model_dump(mode="json")
        shown["data_source"] = mask_dsn(self.data_source)
        shown["base_kafka_config"] = mask_options(self.base_kafka_config)
        shown["producer_kafka_config"] = mask_options(self.producer_kafka_config)
        return shown

    def __repr_args__(self) -> Iterator[tuple[str, Any]]:
        """Pydantic builds repr, str and rich's output from this: the single place to mask them all."""
        yield from self.masked().items()
