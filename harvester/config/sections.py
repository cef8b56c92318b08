"""The tables of a configuration: limits, and what the parts of a harvester are told."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, model_validator

from harvester.config import timing
from harvester.config.fields import (
    Conflict,
    Duration,
    SessionDuration,
    one_of,
    read_control_socket,
    read_listen,
    read_notice_topic,
    read_switch,
    whole_number,
)
from harvester.config.oauth import read_hook_name
from harvester.config.settings import Settings, derived

LEVELS = ("trace", "debug", "info", "warning", "error")


class Limits(Settings):
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


class Poison(Settings):
    """What becomes of a record that Kafka will not take; see docs/dead-letters.md."""

    policy: Annotated[Literal["quarantine", "hold", "stop"], BeforeValidator(one_of("quarantine", "hold", "stop"))] = (
        "quarantine"
    )
    notice_topic: Annotated[str, BeforeValidator(read_notice_topic)] = ""


class Logging(Settings):
    """What is logged."""

    level: Annotated[str, BeforeValidator(one_of(*LEVELS))] = "info"


class Http(Settings):
    """What is said over HTTP; see docs/operations.md."""

    listen: Annotated[str, BeforeValidator(read_listen)] = "off"


class Control(Settings):
    """How a running harvester is controlled; see docs/operations.md."""

    socket: Annotated[str, BeforeValidator(read_control_socket)] = "auto"


class Tracing(Settings):
    """Whether traces go on with the records; see docs/operations.md."""

    enabled: Annotated[bool, BeforeValidator(read_switch)] = False


class OAuth(Settings):
    """Where tokens for Kafka come from (SASL OAUTHBEARER); see docs/security.md."""

    token: Annotated[str, BeforeValidator(read_hook_name)] = ""
