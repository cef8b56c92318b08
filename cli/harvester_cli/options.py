"""Options shared by several commands, individually and as groups."""

from __future__ import annotations

import base64
import dataclasses
import inspect
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

if TYPE_CHECKING:
    from harvester.config import Config, Loaded
    from harvester.coordination.settings import ConsumerSettings
    from harvester.errors import Problem


ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-f",
        help="Configuration file (TOML). Default: $HARVESTER_CONFIG, then ./harvester.toml, then the defaults.",
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="SETTING=VALUE",
        help="Override a setting: --set limits.shards=4. May be given several times; the last one wins.",
    ),
]
LogLevelOption = Annotated[str | None, typer.Option("--log-level", help="trace, debug, info, warning or error.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]


def duration(text: str, option: str) -> timedelta:
    """Parse a duration such as 90s or 2h; raises typer.BadParameter."""
    from harvester.config import parse_duration

    try:
        return parse_duration(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from error


def moment(text: str, option: str) -> datetime | timedelta:
    """A time, UTC by default, or a duration before now; raises typer.BadParameter."""
    from harvester.config import parse_duration

    with suppress(ValueError):
        age = parse_duration(text)
        try:
            datetime.now(UTC) - age
        except OverflowError as error:
            raise typer.BadParameter("is before the year 1", param_hint=option) from error
        return age
    try:
        found = datetime.fromisoformat(text)
    except ValueError as error:
        raise typer.BadParameter("is neither a duration (2h, 7d) nor a time (ISO 8601)", param_hint=option) from error
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)


def is_utf8(text: str) -> bool:
    """Whether an argument is text: Python keeps other bytes of a command line as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def from_base64(text: str, option: str) -> bytes:
    """Decode base64; raises typer.BadParameter."""
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise typer.BadParameter(f"is not base64: {error}", param_hint=option) from error


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command take groups of options: for each parameter that is a dataclass, its fields become options."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if dataclasses.is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        group = groups.get(parameter.name)
        if group is None:
            parameters.append(parameter.replace(annotation=hints[parameter.name]))
            continue
        fields = get_type_hints(group, include_extras=True)
        parameters += [
            parameter.replace(name=field.name, annotation=fields[field.name], default=field.default)
            for field in dataclasses.fields(group)
        ]
    parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]

    @wraps(command)
    def run(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in dataclasses.fields(group)})
        command(**given)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


@dataclasses.dataclass
class ConfigOptions:
    """The options that select the configuration file and override its settings."""

    config: ConfigOption = None
    set_: SetOption = None

    def load(self) -> Config:
        """The configuration; raises ConfigurationError with all problems."""
        return self.load_with_origin().config

    def load_for_kafka(self, *overrides: str) -> Config:
        """The same for a command that connects to Kafka: what its client refuses is a problem, too."""
        from harvester.config import check_clients

        return self.load_with_origin(*overrides, check=check_clients).config

    def load_with_origin(self, *overrides: str, check: Callable[[Config], list[Problem]] | None = None) -> Loaded:
        """The configuration, and the origin of each part. Further overrides win over `--set`."""
        from harvester import config as configuration

        return configuration.load(self.config, [*(self.set_ or ()), *overrides], check=check)


@dataclasses.dataclass
class LoggedOptions(ConfigOptions):
    """The same, with a log level."""

    log_level: LogLevelOption = None

    def load_with_origin(self, *overrides: str, check: Callable[[Config], list[Problem]] | None = None) -> Loaded:
        level = [] if self.log_level is None else [f"logging.level={self.log_level}"]
        return super().load_with_origin(*overrides, *level, check=check)


def group_name(text: str | None) -> str | None:
    """The callback of options that name a group. Raises ConfigurationError: an empty name aborts Kafka's client, and
    with it the process.
    """
    from harvester.errors import ConfigurationError, Problem

    if text == "":
        raise ConfigurationError([Problem("group", "is empty")])
    if text is not None and not is_utf8(text):
        raise ConfigurationError([Problem("group", "is not valid UTF-8")])
    return text


BootstrapOption = Annotated[
    str | None,
    typer.Option("--bootstrap", metavar="HOST:PORT", help="Kafka [default: base_kafka_config of the configuration]."),
]


@dataclasses.dataclass
class CoordinationOptions(LoggedOptions):
    """Options of consumers and of the commands that inspect them."""

    bootstrap: BootstrapOption = None
    coordination_topic: Annotated[
        str, typer.Option("--coordination-topic", help="The topic through which consumers coordinate.")
    ] = "__marshal"
    heartbeat_interval: Annotated[
        str,
        typer.Option(
            "--heartbeat-interval", metavar="DURATION", help="Must be the same for all consumers of the topic."
        ),
    ] = "5s"

    def settings(self, **given: Any) -> ConsumerSettings:
        """The options as settings; sets up the log. Raises typer.BadParameter for invalid values."""
        from harvester.coordination.settings import ConsumerSettings
        from harvester.telemetry.logging import configure

        interval_s = duration(self.heartbeat_interval, "--heartbeat-interval").total_seconds()
        if interval_s < 1:
            raise typer.BadParameter("is less than one second", param_hint="--heartbeat-interval")
        where = [] if self.bootstrap is None else [f"base_kafka_config.bootstrap.servers={self.bootstrap}"]
        config = self.load_for_kafka(*where)
        configure(config.logging.level, name=config.name)
        return ConsumerSettings(
            kafka=config.common_options(),
            heartbeat_interval_s=interval_s,
            coordination_topic=self.coordination_topic,
            claim_check=config.oversize.store_settings,
            **given,
        )
