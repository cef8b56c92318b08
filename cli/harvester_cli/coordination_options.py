"""How the commands of coordinated consumers are told which topic they coordinate through, and where that is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harvester_cli.options import load

if TYPE_CHECKING:
    from harvester.coordination.settings import ConsumerSettings

BootstrapOption = Annotated[
    str | None,
    typer.Option(
        "--bootstrap",
        metavar="HOST:PORT",
        help="Kafka. Without it: base_kafka_config of the configuration.",
        show_default=False,
    ),
]
CoordinationTopicOption = Annotated[
    str, typer.Option("--coordination-topic", help="Where consumers say what they hold.")
]
HeartbeatIntervalOption = Annotated[
    str, typer.Option("--heartbeat-interval", metavar="DURATION", help="The same for all consumers of the topic.")
]
DEFAULT_TOPIC = "__marshal"
DEFAULT_INTERVAL = "5s"


def consumer_settings(
    config: Path | None,
    set_: list[str] | None,
    log_level: str | None,
    bootstrap: str | None,
    heartbeat_interval: str,
    **given: Any,
) -> ConsumerSettings:
    """The options as settings; sets up the log. Raises typer.BadParameter for what cannot be read."""
    from harvester.config import parse_duration
    from harvester.coordination.settings import ConsumerSettings
    from harvester.telemetry.logging import configure

    try:
        interval = parse_duration(heartbeat_interval)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--heartbeat-interval") from error
    if interval.total_seconds() < 1:
        raise typer.BadParameter("is less than a second", param_hint="--heartbeat-interval")
    overrides = [*(set_ or ()), *([] if bootstrap is None else [f"base_kafka_config.bootstrap.servers={bootstrap}"])]
    loaded = load(config, overrides, log_level)
    configure(loaded.logging.level, name=loaded.name)
    return ConsumerSettings(kafka=loaded.common_options(), heartbeat_interval_s=interval.total_seconds(), **given)
