"""`harvester doctor`: check everything that a harvester needs, and give advice."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from harvester_cli.dashboard.figures import counted
from harvester_cli.options import ConfigOptions, JsonOption, grouped
from harvester_cli.output import console, spinner

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
        typer.Option("--probe", help="Create a temporary topic, to read the brokers' clock."),
    ] = False,
    json_: JsonOption = False,
) -> None:
    """Check machine, database, outbox, Kafka and topics, and give advice for each finding.

    Changes nothing (but see --probe). Exits with 1 if there is a problem, with 0 if there are only warnings.
    """
    settings = options.load()

    from harvester.doctor import examine

    with spinner("checking") as status:
        report = examine(settings, probe=probe, progress=lambda what: status.update(f"{what} …"))
    if json_:
        typer.echo(json.dumps(report.as_json(), indent=2, ensure_ascii=False))
    else:
        _print(report)
    if not report.ok:
        raise typer.Exit(1)


def _print(report: DoctorReport) -> None:
    # Wrapped by the terminal, never cut: a line can be searched and copied as it is.
    screen = console(highlight=False, soft_wrap=True)
    for line in lines_of(report):
        screen.print(line)


def lines_of(report: DoctorReport) -> Iterator[Text]:
    """A line for each finding, in the report's order, with advice below it, and a verdict. Levels are words."""
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
