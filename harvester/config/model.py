"""The configuration: every setting with its type, default and rules (seeds 001/004, "Configuration").

Constructing a model raises ConfigurationError with everything that is wrong. Defaults that follow from other settings
are filled in, so a `Config` holds effective values only; `model_fields_set` tells what was given. A Config pickles
whole; everything that prints it masks secrets.

What every table of settings is: immutable, and refused with everything that is wrong with it.

The tables of a configuration: limits, and what the parts of a harvester are told.

Rules between settings, apart from those of `timing`. Each gives what is wrong; nothing: they go together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from harvester.config import kafka_options, timing
from harvester.config.clients import ClientSettings, hook_problems, read_hook_name
from harvester.config.dsn import effective_dsn, mask_dsn
from harvester.config.durations import format_duration, to_ms
from harvester.config.fields import (
    Conflict,
    Duration,
    Retention,
    SessionDuration,
    one_of,
    read_control_socket,
    read_data_source,
    read_group_id,
    read_header_name,
    read_listen,
    read_name,
    read_notice_topic,
    read_switch,
    read_table_name,
    read_topic,
    whole_number,
)
from harvester.config.identity import default_group_id, default_name
from harvester.config.problems import problems_from, refuse, refuse_all, under
from harvester.config.secrets import mask_options
from harvester.errors import ConfigurationError, Problem
from harvester.origin import HEADER
from harvester.outbox.tables import OutboxTable


def derived(compute: Any) -> Any:
    """A default computed from the fields above it (pydantic skips it when one of those is invalid)."""
    return Field(default_factory=compute)


class SettingsTable(BaseModel):
    """A table; its fields are the settings. `_aliases`: other names that may be given -> the setting's own."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, validate_default=True)
    _aliases: ClassVar[Mapping[str, str]] = {}

    if not TYPE_CHECKING:  # type checkers keep the signature that the fields give

        def __init__(self, /, **data: Any) -> None:
            try:
                super().__init__(**data)
            except ValidationError as error:
                # Not chained: pydantic's error holds the input, secrets included.
                raise ConfigurationError(problems_from(error, known_names(type(self)))) from None


def nested(kind: type[SettingsTable], name: str) -> BeforeValidator:
    """A table inside another: its problems are reported with their whole paths."""

    def read(value: object) -> object:
        if isinstance(value, kind):
            return value
        if not isinstance(value, Mapping):
            refuse(f"must be a table ([{name}])")
        try:
            return kind(**{str(key): inner for key, inner in value.items()})
        except ConfigurationError as error:
            refuse_all(under(name, error.problems))

    return BeforeValidator(read)


def known_names(kind: type[SettingsTable]) -> dict[str, str]:
    """Every name that a user may have in mind -> the path that is right, seen from inside `kind`."""
    known = {name: name for name in kind.model_fields}
    for table, field in kind.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, SettingsTable):
            known |= {name: f"{table}.{path}" for name, path in known_names(inner).items()}
    return known | dict(kind._aliases)


LEVELS = ("trace", "debug", "info", "warning", "error")


class Limits(SettingsTable):
    """Times and amounts. All durations are above zero; see docs/configuration.md for how they depend on each other."""

    _aliases: ClassVar[Mapping[str, str]] = {"send_concurrency": "shards"}

    poll_duration: Duration = timedelta(milliseconds=1)
    min_poll_interval: Duration = timedelta(milliseconds=100)
    heartbeat_timeout: Duration = timedelta(seconds=3)
    max_poll_interval: Duration = derived(lambda given: given["heartbeat_timeout"] / 2)
    session_timeout: SessionDuration = derived(lambda given: timing.default_session_timeout(given["heartbeat_timeout"]))
    queue_timeout: Duration = timedelta(seconds=30)
    drain_interval: Duration = derived(
        lambda given: timing.default_drain_interval(
            given["session_timeout"], given["heartbeat_timeout"], given["queue_timeout"]
        )
    )
    mark_backoff: Duration = timedelta(milliseconds=10)
    mark_backoff_max: Duration = timedelta(milliseconds=100)
    io_error_backoff: Duration = timedelta(milliseconds=500)
    head_scan_interval: Duration = timedelta(minutes=1)
    max_in_flight_records: Annotated[int, BeforeValidator(whole_number(1, 1_000_000))] = 1000
    shards: Annotated[int, BeforeValidator(whole_number(1, 256))] = 8
    records_per_shard: Annotated[int, BeforeValidator(whole_number(0, 1_000_000))] = 200
    send_buffer: Annotated[int, BeforeValidator(whole_number(1, 100_000))] = 10
    max_queued_per_key: Annotated[int, BeforeValidator(whole_number(1, 1_000_000))] = 100
    max_attempts: Annotated[int, BeforeValidator(whole_number(1, 1_000_000))] = 5
    max_transaction_records: Annotated[int, BeforeValidator(whole_number(1, 50_000))] = 2_000
    mark_query_records: Annotated[int, BeforeValidator(whole_number(1, 100_000))] = 100
    min_metrics_interval: Duration = timedelta(seconds=5)
    retry_backoff: Duration = timedelta(milliseconds=100)
    retry_backoff_max: Duration = timedelta(seconds=10)
    restart_budget: Annotated[int, BeforeValidator(whole_number(0, 10_000))] = 5
    restart_window: Duration = timedelta(seconds=60)

    @model_validator(mode="before")
    @classmethod
    def _send_concurrency(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or "send_concurrency" not in data:
            return data
        rest = {name: value for name, value in data.items() if name != "send_concurrency"}
        alias = data["send_concurrency"]
        differ = "shards" in rest and str(rest["shards"]) != str(alias)
        return rest | {"shards": Conflict("send_concurrency") if differ else alias}


class PoisonSettings(SettingsTable):
    """What becomes of a record that Kafka will not take; see docs/dead-letters.md."""

    policy: Annotated[Literal["quarantine", "hold", "stop"], BeforeValidator(one_of("quarantine", "hold", "stop"))] = (
        "quarantine"
    )
    notice_topic: Annotated[str, BeforeValidator(read_notice_topic)] = ""


class Logging(SettingsTable):
    """What is logged."""

    level: Annotated[str, BeforeValidator(one_of(*LEVELS))] = "info"


class Http(SettingsTable):
    """What is said over HTTP; see docs/operations.md."""

    listen: Annotated[str, BeforeValidator(read_listen)] = "off"


class Control(SettingsTable):
    """How a running harvester is controlled; see docs/operations.md."""

    socket: Annotated[str, BeforeValidator(read_control_socket)] = "auto"


class Tracing(SettingsTable):
    """Whether traces go on with the records; see docs/operations.md."""

    enabled: Annotated[bool, BeforeValidator(read_switch)] = False


class OAuth(SettingsTable):
    """Where tokens for Kafka come from (SASL OAUTHBEARER); see docs/security.md."""

    token: Annotated[str, BeforeValidator(read_hook_name)] = ""


def order_problems(limits: Limits) -> list[Problem]:
    """A backoff is no longer than the longest that it may become."""
    pairs = (("mark_backoff", "mark_backoff_max"), ("retry_backoff", "retry_backoff_max"))
    found = []
    for low, high in pairs:
        least, most = getattr(limits, low), getattr(limits, high)
        if least > most:
            text = f"is {format_duration(most)}, below {low} ({format_duration(least)})"
            found.append(Problem(f"limits.{high}", text, f"at least {format_duration(least)}"))
    return found


def linger_problems(producer_options: Mapping[str, str], delivery_timeout: timedelta) -> list[Problem]:
    """Lingering leaves time to deliver."""
    linger = kafka_options.get(producer_options, "linger.ms")
    try:
        too_long = linger is not None and float(linger) >= to_ms(delivery_timeout)
    except ValueError:
        too_long = False  # `harvester config check` asks librdkafka what it thinks of values
    if not too_long or delivery_timeout < timing.MIN_DELIVERY_TIMEOUT:
        return []
    path = kafka_options.option_path("producer_kafka_config", "linger.ms")
    return [Problem(path, "is no shorter than the delivery timeout", f"below {to_ms(delivery_timeout)}")]


def notice_problems(notice_topic: str, leader_topic: str) -> list[Problem]:
    """Notices of poison do not go where members of the group read heartbeats."""
    if notice_topic != leader_topic:
        return []
    return [Problem("poison.notice_topic", "is the leader topic, on which only heartbeats may be", "another topic")]


DEFAULT_BOOTSTRAP = "localhost:9092"
DEFAULT_DATA_SOURCE = "host=localhost port=5432 user=postgres password= dbname=postgres sslmode=disable"
LEADER_TOPIC_SUFFIX = ".neli"
PROGRESS_TOPIC_SUFFIX = ".progress"
WORTHWHILE_SHARDS_PER_CORE = 4  # more take memory and sessions, and move no more
# Limits that have another default in exactly-once mode.
TRANSACTIONS = {"max_in_flight_records": 10_000, "mark_query_records": 1_000}


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
    leader_group_id: Annotated[str, BeforeValidator(read_group_id)] = Field(default_factory=default_group_id)
    leader_topic: Annotated[str, BeforeValidator(read_topic)] = derived(
        lambda given: given["leader_group_id"] + LEADER_TOPIC_SUFFIX
    )
    data_source: Annotated[str, BeforeValidator(read_data_source)] = DEFAULT_DATA_SOURCE
    outbox_table: Annotated[str, BeforeValidator(read_table_name)] = "outbox"
    name: Annotated[str, BeforeValidator(read_name)] = Field(default_factory=default_name)
    delivery: Annotated[
        Literal["at-least-once", "exactly-once"], BeforeValidator(one_of("at-least-once", "exactly-once"))
    ] = "at-least-once"
    record_header: Annotated[str, BeforeValidator(read_header_name)] = HEADER
    record_timestamp: Annotated[
        Literal["produce", "create_time"], BeforeValidator(one_of("produce", "create_time"))
    ] = "produce"
    marking: Annotated[Literal["memory", "table"], BeforeValidator(one_of("memory", "table"))] = "memory"
    archive: Annotated[Literal["off", "ids", "rows"], BeforeValidator(one_of("off", "ids", "rows"))] = "off"
    archive_retention: Retention = timedelta(days=7)
    limits: Annotated[Limits, nested(Limits, "limits")] = Field(default_factory=Limits)
    poison: Annotated[PoisonSettings, nested(PoisonSettings, "poison")] = Field(default_factory=PoisonSettings)
    logging: Annotated[Logging, nested(Logging, "logging")] = Field(default_factory=Logging)
    http: Annotated[Http, nested(Http, "http")] = Field(default_factory=Http)
    tracing: Annotated[Tracing, nested(Tracing, "tracing")] = Field(default_factory=Tracing)
    control: Annotated[Control, nested(Control, "control")] = Field(default_factory=Control)
    oauth: Annotated[OAuth, nested(OAuth, "oauth")] = Field(default_factory=OAuth)

    @model_validator(mode="before")
    @classmethod
    def _bounds_of_transactions(cls, data: Any) -> Any:
        """Records wait for their transaction, and none is repeated after a crash: more of them may be under way."""
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
            *order_problems(self.limits),
            *linger_problems(self.producer_kafka_config, self.delivery_timeout),
            *notice_problems(self.poison.notice_topic, self.leader_topic),
            *hook_problems(self.oauth.token, self.base_kafka_config),
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
        """g: how often the Kafka client proves to the group that it lives."""
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
        """How long a new member lets others join first: as long as a dead one could hold the group back for longer
        than the leader's last commit proves its place (P39)."""
        limits = self.limits
        beat = timing.heartbeat_interval(limits.heartbeat_timeout, limits.min_poll_interval)
        return self.delivery_timeout + timing.SCAN_INTERVAL + beat + timing.CLIENT_TICK

    @property
    def timing(self) -> timing.Timing:
        """The limits that depend on each other, all in effect."""
        limits = self.limits
        return timing.Timing(
            heartbeat_timeout=limits.heartbeat_timeout,
            session_timeout=limits.session_timeout,
            min_poll_interval=limits.min_poll_interval,
            max_poll_interval=limits.max_poll_interval,
            drain_interval=limits.drain_interval,
            delivery_timeout=self.delivery_timeout,
            delivery_given=kafka_options.get(self.producer_kafka_config, "delivery.timeout.ms") is not None,
            rebalance_timeout=self.rebalance_timeout,
        )

    @property
    def table(self) -> OutboxTable:
        """The names of the outbox and of the tables beside it."""
        return OutboxTable.parse(self.outbox_table)

    @property
    def dsn(self) -> str:
        """What to connect with: `data_source`, only to a server that takes writes, named after this instance."""
        return effective_dsn(self.data_source, application_name=f"harvester {self.name}")

    # The values of the options are all text; Any, because some of the client's signatures ask for a wider type.

    def common_options(self) -> dict[str, Any]:
        """Options of the admin client and of the election's producer; a consumer has more: `consumer_options`."""
        return self._clients().common()

    def producer_options(self) -> dict[str, Any]:
        """Options of a shard's producer, guards applied."""
        return self._clients().for_producer()

    def lane_options(self) -> dict[str, Any]:
        """Options of a shard's transactional producer in exactly-once mode, without the lane's own id."""
        return self._clients().for_lane()

    @property
    def progress_topic(self) -> str:
        """Where lanes note what they have committed (exactly-once mode)."""
        return self.leader_group_id + PROGRESS_TOPIC_SUFFIX

    def consumer_options(self) -> dict[str, Any]:
        """Options of the member of the leader group, guards applied."""
        return self._clients().for_consumer()

    def masked(self) -> dict[str, Any]:
        """All settings as plain values for printing: durations as text, secrets masked."""
        shown: dict[str, Any] = self.model_dump(mode="json")
        shown["data_source"] = mask_dsn(self.data_source)
        shown["base_kafka_config"] = mask_options(self.base_kafka_config)
        shown["producer_kafka_config"] = mask_options(self.producer_kafka_config)
        return shown

    def __repr_args__(self) -> Iterator[tuple[str, Any]]:
        """Pydantic builds repr, str and rich's form from this: the one place to mask them all."""
        yield from self.masked().items()

    def _clients(self) -> ClientSettings:
        return ClientSettings(
            base=self.base_kafka_config,
            producer=self.producer_kafka_config,
            client_id=self.name,
            log_level=self.logging.level,
            delivery_timeout=self.delivery_timeout,
            max_in_flight_records=self.limits.max_in_flight_records,
            group_id=self.leader_group_id,
            session_timeout=self.limits.session_timeout,
            group_heartbeat_interval=self.group_heartbeat_interval,
            rebalance_timeout=self.rebalance_timeout,
            min_poll_interval=self.limits.min_poll_interval,
            token_hook=self.oauth.token,
        )
