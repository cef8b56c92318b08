"""`harvester doctor`: checks everything a harvester needs, and says what to do about what is missing.

A report for people: a line for each finding, what to do below it, and a verdict. Levels are words.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from harvester.doctor import Finding, Level, Report
from harvester_cli.options import ConfigOption, JsonOption, SetOption, load

if TYPE_CHECKING:
    from harvester.doctor import Report

_STYLES = {Level.OK: "green", Level.SKIPPED: "dim", Level.WARNING: "yellow", Level.PROBLEM: "bold red"}
_INDENT = 9


def lines_of(report: Report) -> Iterator[Text]:
    """In the report's order; the last line sums up."""
    for finding in report.findings:
        yield _line(finding)
        if finding.advice and finding.level is not Level.OK:
            yield Text(f"{'':{_INDENT}}do: {finding.advice}")
    yield Text("")
    yield _verdict(report)


def _line(finding: Finding) -> Text:
    level = f"{finding.level.value:{_INDENT}}"
    return Text.assemble((level, _STYLES[finding.level]), (finding.check, "bold"), f": {finding.found}")


def _verdict(report: Report) -> Text:
    problems, warnings = len(report.of(Level.PROBLEM)), len(report.of(Level.WARNING))
    if problems:
        return Text(f"{_count(problems, 'problem')}, {_count(warnings, 'warning')}", style="bold red")
    if warnings:
        return Text(f"no problem, {_count(warnings, 'warning')}", style="yellow")
    return Text("all is well", style="green")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


class JavaCommand(StrEnum):
    """Commands that need Java."""

    STACK = "stack"
    PIPELINE = "pipeline"


def doctor(
    config: ConfigOption = None,
    set_: SetOption = None,
    also: Annotated[
        list[JavaCommand] | None,
        typer.Option("--also", help="Also look for the Java of this command.", show_default=False),
    ] = None,
    probe: Annotated[
        bool,
        typer.Option("--probe", help="Make a topic for a moment, to see the brokers' clock."),
    ] = False,
    json_: JsonOption = False,
) -> None:
    """Check machine, database, outbox, Kafka and topics, and say what to do about each finding.

    Changes nothing (but see --probe). Exits with 1 when there is a problem, with 0 when there are warnings at most.
    """
    settings = load(config, set_)

    from rich.console import Console

    from harvester.doctor import examine

    # The spinner is for people only: rich shows none where stderr is no terminal.
    with Console(stderr=True).status("looking around …") as status:
        report = examine(
            settings,
            also=[each.value for each in also or ()],
            probe=probe,
            progress=lambda what: status.update(f"{what} …"),
        )
    if json_:
        import json

        typer.echo(json.dumps(report.as_json(), indent=2, ensure_ascii=False))
    else:
        _print(report)
    if not report.ok:
        raise typer.Exit(1)


def _print(report: Report) -> None:
    from rich.console import Console

    # moved

    # Wrapped by the terminal, never cut: a line can be searched and read out as it is.
    console = Console(highlight=False, soft_wrap=True)
    for line in lines_of(report):
        console.print(line)
