"""`harvester doctor`: check everything that a harvester needs, and advise."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from harvester_cli.dashboard.figures import counted
from harvester_cli.options import ConfigOptions, JsonOption, grouped
from harvester_cli.output import spinner

if TYPE_CHECKING:
    from rich.text import Text

    from harvester.doctor import DoctorReport

_STYLES = {"ok": "green", "skipped": "dim", "warning": "yellow", "problem": "bold red"}
_INDENT = 9


@grouped
def doctor(
    options: ConfigOptions,
    probe: Annotated[
        bool,
        typer.Option("--probe", help="Make a topic for a moment, to see the brokers' clock."),
    ] = False,
    json_: JsonOption = False,
) -> None:
    """Check machine, database, outbox, Kafka and topics, and say what to do about each finding.

    Changes nothing (but see --probe). Exits with 1 when there is a problem, with 0 when there are warnings at most.
    """
    settings = options.load()

    from harvester.doctor import examine

    with spinner("looking around") as status:
        report = examine(settings, probe=probe, progress=lambda what: status.update(f"{what} …"))
    if json_:
        typer.echo(json.dumps(report.as_json(), indent=2, ensure_ascii=False))
    else:
        _print(report)
    if not report.ok:
        raise typer.Exit(1)


def _print(report: DoctorReport) -> None:
    from rich.console import Console

    # Wrapped by the terminal, never cut: a line can be searched and read out as it is.
    console = Console(highlight=False, soft_wrap=True)
    for line in lines_of(report):
        console.print(line)


def lines_of(report: DoctorReport) -> Iterator[Text]:
    """A line for each finding, in the report's order, what to do below it, and a verdict. Levels are words."""
    from rich.text import Text

    from harvester.doctor import CheckLevel

    for finding in report.findings:
        level = finding.level.value
        yield Text.assemble((f"{level:{_INDENT}}", _STYLES[level]), (finding.check, "bold"), f": {finding.found}")
        if finding.advice and finding.level is not CheckLevel.OK:
            yield Text(f"{'':{_INDENT}}do: {finding.advice}")
    yield Text("")
    problems, warnings = len(report.of(CheckLevel.PROBLEM)), len(report.of(CheckLevel.WARNING))
    if problems:
        yield Text(f"{counted(problems, 'problem')}, {counted(warnings, 'warning')}", style="bold red")
    elif warnings:
        yield Text(f"no problem, {counted(warnings, 'warning')}", style="yellow")
    else:
        yield Text("all is well", style="green")
