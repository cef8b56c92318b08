"""What the commands of `harvester pipeline` share: options, and how they are read."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from harvester_cli.options import load

if TYPE_CHECKING:
    from datetime import datetime

    from harvester.config import Config
    from harvester.pipeline.session import SessionSettings

MasterOption = Annotated[
    str | None,
    typer.Option(help="As for spark-submit: local[2], spark://HOST:PORT, yarn, k8s://… [default: local[*]]."),
]
ConfOption = Annotated[
    list[str] | None,
    typer.Option("--conf", metavar="NAME=VALUE", help="A setting of Spark, as for spark-submit.", show_default=False),
]
KafkaOption = Annotated[
    list[str] | None,
    typer.Option("--kafka", metavar="NAME=VALUE", help="An option of Kafka's Java client.", show_default=False),
]
SinceOption = Annotated[
    str | None,
    typer.Option("--from", metavar="TIME", help="From then on: ISO 8601, or so long ago: 2h.", show_default=False),
]
UntilOption = Annotated[
    str | None, typer.Option("--until", metavar="TIME", help="Up to then, without it.", show_default=False)
]
TopicsOption = Annotated[list[str], typer.Option("--topic", help="May be given several times.")]
TablesOption = Annotated[str, typer.Option("--to", metavar="DIRECTORY", help="Where the tables are: a path or a URL.")]
OnceOption = Annotated[bool, typer.Option("--once", help="Up to where the topics end now, then exit.")]
EveryOption = Annotated[str, typer.Option("--every", metavar="DURATION", help="Begin a batch this often.")]
CompactOption = Annotated[
    int, typer.Option("--compact-every", min=0, help="Join small files after so many batches; 0: never.")
]
LakeOption = Annotated[str, typer.Option("--lake", metavar="DIRECTORY", help="The tables of `pipeline lake`.")]


def configuration(config: Path | None, set_: list[str] | None, bootstrap: str | None = None) -> Config:
    """The configuration; without a header, by which records are recognised, it is refused."""
    overrides = [*(set_ or ()), *([] if bootstrap is None else [f"base_kafka_config.bootstrap.servers={bootstrap}"])]
    loaded = load(config, overrides)
    if not loaded.record_header:
        raise typer.BadParameter("is empty: records do not say where they come from", param_hint="record_header")
    return loaded


def spark_settings(job: str, master: str | None, conf: list[str] | None, log_level: str | None) -> SessionSettings:
    """The Spark session of a job."""
    from harvester.pipeline.session import SessionSettings

    level = (log_level or "FATAL").upper().replace("WARNING", "WARN")
    return SessionSettings(f"harvester {job}", master, pairs(conf, "--conf"), level)


def java_options(loaded: Config, kafka: list[str] | None) -> dict[str, str]:
    """Kafka's options for the Java client: those of the configuration, then those of --kafka."""
    from harvester.pipeline.source import for_java

    return {**for_java(loaded.common_options()), **pairs(kafka, "--kafka")}


def pairs(given: list[str] | None, option: str) -> dict[str, str]:
    """NAME=VALUE, as often as given."""
    found = {}
    for one in given or ():
        name, equals, value = one.partition("=")
        if not name or not equals:
            raise typer.BadParameter(f"{one!r} is not NAME=VALUE", param_hint=option)
        found[name.strip()] = value.strip()
    return found


def seconds(text: str, option: str) -> float:
    """A duration, in seconds."""
    from harvester.config import parse_duration

    try:
        return parse_duration(text).total_seconds()
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from error


def moment(text: str | None, now: datetime, option: str) -> datetime | None:
    """A time, or so long before `now`; UTC if it does not say another zone."""
    from datetime import UTC, datetime

    from harvester.config import parse_duration

    if text is None:
        return None
    try:
        return now - parse_duration(text)
    except (ValueError, OverflowError):
        pass
    try:
        found = datetime.fromisoformat(text)
    except ValueError as error:
        raise typer.BadParameter("is neither a duration (2h, 7d) nor a time (ISO 8601)", param_hint=option) from error
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)


def absolute(path: str) -> str:
    """A path or URL for Spark: a table's name in SQL is not resolved against the working directory."""
    return path if "://" in path else str(Path(path).absolute())


def say(line: str) -> None:
    """A line of progress, on standard error."""
    print(f"pipeline: {line}", file=sys.stderr, flush=True)
