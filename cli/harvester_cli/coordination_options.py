"""Options of the commands for coordinated consumers: the coordination topic, and its cluster."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harvester_cli.options import LoggedOptions, duration

if TYPE_CHECKING:
    from harvester.coordination.settings import ConsumerSettings

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
        config = self.load_with_origin(*where).config
        configure(config.logging.level, name=config.name)
        return ConsumerSettings(
            kafka=config.common_options(),
            heartbeat_interval_s=interval_s,
            coordination_topic=self.coordination_topic,
            claim_check=config.oversize.store_settings,
            **given,
        )
