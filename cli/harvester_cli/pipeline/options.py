"""The common part of the commands of `harvester pipeline`: options, and how they are parsed."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from harvester_cli.options import BootstrapOption, ConfigOption, ConfigOptions, LogLevelOption, SetOption, moment

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from harvester.config import Config
    from harvester.pipeline.lake.typed import SchemaRegistry


def absolute(path: str) -> str:
    """A path or URL for Spark, which does not resolve a table's name in SQL against the working directory."""
    return path if "://" in path else str(Path(path).absolute())


def directory(help_: str, *names: str) -> Any:
    """An option that names a directory."""
    return typer.Option(*names, metavar="DIRECTORY", parser=absolute, help=help_)


def place(path: str) -> str:
    """The location of tables, as an absolute path unless it may be CATALOG.SCHEMA: only Spark knows its catalogs."""
    return path if re.fullmatch(r"[\w-]+(\.[\w-]+)+", path) else absolute(path)


def tables(help_: str, *names: str) -> Any:
    """An option that names the location of tables."""
    return typer.Option(*names, metavar="DIRECTORY|CATALOG.SCHEMA", parser=place, help=help_)


def address(text: str) -> str:
    """HOST:PORT, as in the setting `http.listen`."""
    from harvester.config.model import Http
    from harvester.errors import ConfigurationError

    try:
        found = Http(listen=text).listen
    except ConfigurationError as error:
        raise typer.BadParameter(error.problems[0].message) from error
    if found == "off":
        raise typer.BadParameter("must be HOST:PORT")
    return found


SinceOption = Annotated[
    str | None,
    typer.Option("--from", metavar="TIME", help="From this time: ISO 8601, or a duration before now: 2h."),
]
UntilOption = Annotated[
    str | None, typer.Option("--until", metavar="TIME", help="Up to, but not including, this time.")
]
TablesOption = Annotated[str, tables("Location of the tables: a path, a URL, or CATALOG.SCHEMA.", "--to")]
LakeOption = Annotated[str, tables("The tables of `pipeline lake`.")]
FormatOption = Annotated[
    Literal["delta", "iceberg"] | None, typer.Option("--format", help="Format of the tables [default: delta].")
]
OnceOption = Annotated[bool, typer.Option("--once", help="Read up to the current ends of the topics, then exit.")]
EveryOption = Annotated[str, typer.Option("--every", metavar="DURATION", help="How often to begin a batch.")]
ListenOption = Annotated[
    str | None,
    typer.Option("--listen", metavar="HOST:PORT", parser=address, help="Serve metrics for Prometheus at /metrics."),
]
CompactOption = Annotated[
    int, typer.Option("--compact-every", min=0, help="Join small files after this many batches; 0: never.")
]


@dataclass
class Job:
    """The options common to all jobs, and what follows from them."""

    config_file: ConfigOption = None
    set_: SetOption = None
    log_level: LogLevelOption = None
    bootstrap: BootstrapOption = None
    master: Annotated[
        str | None,
        typer.Option(help="As for spark-submit: local[2], spark://HOST:PORT, yarn, k8s://… [default: local[*]]."),
    ] = None
    conf: Annotated[
        list[str] | None, typer.Option("--conf", metavar="NAME=VALUE", help="A setting of Spark, as for spark-submit.")
    ] = None
    kafka_options: Annotated[
        list[str] | None, typer.Option("--kafka", metavar="NAME=VALUE", help="An option for Kafka's Java client.")
    ] = None

    @cached_property
    def config(self) -> Config:
        """The configuration; it is refused without a header, since that identifies records."""
        servers = [] if self.bootstrap is None else [f"base_kafka_config.bootstrap.servers={self.bootstrap}"]
        loaded = ConfigOptions(self.config_file, [*(self.set_ or ()), *servers]).load()
        if not loaded.record_header:
            raise typer.BadParameter("is empty: records carry no origin", param_hint="record_header")
        return loaded

    @cached_property
    def kafka(self) -> dict[str, str]:
        """Options for Kafka's Java client: those of the configuration, then those of --kafka."""
        from harvester.pipeline.source import for_java

        return {**for_java(self.config.common_options()), **pairs(self.kafka_options, "--kafka")}

    @contextmanager
    def spark(self, name: str, *conf: str, format_: str | None = None) -> Iterator[SparkSession]:
        """Spark, running for the duration of the block; `conf` and the format of the tables win over --conf."""
        from harvester.pipeline import session

        level = (self.log_level or "FATAL").upper().replace("WARNING", "WARN")
        given = pairs([*(self.conf or ()), *conf], "--conf")
        if format_ is not None:
            given[session.FORMAT] = format_
        settings = session.SessionSettings(f"harvester {name}", self.master, given, level)
        assert self.kafka is not None  # problems with the options are reported before Spark starts
        with session.session(settings, progress=say) as running:
            yield running


def pairs(given: list[str] | None, option: str) -> dict[str, str]:
    """NAME=VALUE pairs."""
    found = {}
    for one in given or ():
        name, equals, value = one.partition("=")
        if not name or not equals:
            raise typer.BadParameter(f"{one!r} is not NAME=VALUE", param_hint=option)
        found[name.strip()] = value.strip()
    return found


def schema_registry(given: list[str] | None) -> SchemaRegistry:
    """The registry with the options of --registry, whose values may refer to environment variables."""
    from harvester.config.load import interpolate_table
    from harvester.pipeline.lake.typed import SchemaRegistry

    named, problems = interpolate_table(pairs(given, "--registry"), os.environ)
    if problems:
        raise typer.BadParameter(str(problems[0]), param_hint="--registry")
    try:
        return SchemaRegistry(named)
    except ValueError as error:
        raise typer.BadParameter(f"{error}; --typed needs at least url=…", param_hint="--registry") from error


def period(since: str | None, until: str | None, first: str = "--from") -> tuple[datetime | None, datetime | None]:
    """The times in --from (or the option `first`) and --until, each a time or a duration before now."""
    now = datetime.now(UTC)

    def at(text: str | None, option: str) -> datetime | None:
        found = None if text is None else moment(text, option)
        try:
            return found if found is None or isinstance(found, datetime) else now - found
        except OverflowError as error:
            raise typer.BadParameter("is too long ago", param_hint=option) from error

    begin, end = at(since, first), at(until, "--until")
    if begin is not None and end is not None and begin >= end:
        raise typer.BadParameter("is not later than --from", param_hint="--until")
    return begin, end


def say(line: str) -> None:
    """Print a progress line to standard error."""
    print(f"pipeline: {line}", file=sys.stderr, flush=True)


def check_writable(file: Path | None, option: str) -> None:
    """Refuse a file that cannot be written, before anything is done of which it is to tell."""
    if file is None:
        return
    parent = file.absolute().parent
    if not parent.is_dir():
        raise typer.BadParameter(f"there is no directory {parent}", param_hint=option)
    if file.is_dir() or not os.access(file if file.exists() else parent, os.W_OK):
        raise typer.BadParameter(f"{file} cannot be written", param_hint=option)
