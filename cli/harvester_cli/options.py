"""Options that several commands share: where the configuration is, what it is overridden with, what is logged."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from harvester.config import Config, Loaded

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-f",
        help="Configuration file (TOML). Without it: $HARVESTER_CONFIG, then ./harvester.toml, then the defaults.",
        show_default=False,
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="SETTING=VALUE",
        help="Override a setting: --set limits.shards=4. May be given several times; the last one wins.",
        show_default=False,
    ),
]
LogLevelOption = Annotated[
    str | None,
    typer.Option("--log-level", help="trace, debug, info, warning or error.", show_default=False),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]


def load(config: Path | None, set_: list[str] | None, log_level: str | None = None) -> Config:
    """The configuration that the options ask for; raises ConfigurationError with everything that is wrong."""
    return load_with_origin(config, set_, log_level).config


def load_with_origin(config: Path | None, set_: list[str] | None, log_level: str | None = None) -> Loaded:
    """`load`, and where each part came from."""
    from harvester import config as configuration

    overrides = list(set_ or ())
    if log_level is not None:
        overrides.append(f"logging.level={log_level}")
    return configuration.load(config, overrides)
