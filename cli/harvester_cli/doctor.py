"""`harvester doctor`: is everything as a harvester needs it, and if not, what to do."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from harvester_cli.options import ConfigOption, JsonOption, SetOption, load

if TYPE_CHECKING:
    from harvester.doctor import DoctorReport


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


def _print(report: DoctorReport) -> None:
    from rich.console import Console

    from harvester_cli.doctor_view import lines_of

    # Wrapped by the terminal, never cut: a line can be searched and read out as it is.
    console = Console(highlight=False, soft_wrap=True)
    for line in lines_of(report):
        console.print(line)
