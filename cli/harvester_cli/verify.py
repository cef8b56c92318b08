"""`harvester verify`: compare what the pump committed with what Kafka holds."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from harvester_cli.options import JsonOption, LoggedOptions, grouped
from harvester_cli.output import print_json, print_rich


class Isolation(StrEnum):
    """What the reader sees of transactions."""

    READ_COMMITTED = "read_committed"
    READ_UNCOMMITTED = "read_uncommitted"


@grouped
def verify(
    options: LoggedOptions,
    isolation: Annotated[
        Isolation, typer.Option(help="Whether records of open and aborted transactions are read.")
    ] = Isolation.READ_COMMITTED,
    topic: Annotated[
        list[str] | None,
        typer.Option(help="Topic to read; may be given several times (default: the pump's).", show_default=False),
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds during which nothing may arrive.")] = 30.0,
    strict: Annotated[bool, typer.Option("--strict", help="Let duplicates fail the verdict, too.")] = False,
    json_: JsonOption = False,
) -> None:
    """Read the topics to their end and judge them by the counts in <outbox>_pump.

    Exits with 0 only when no record is lost, out of order, unexpected or still waiting in the outbox.
    """
    settings = options.load()

    from harvester.errors import VerificationFailed
    from harvester.verify.check import verify as perform
    from harvester_cli.pump import progress
    from harvester_cli.verdict import answer, render

    with progress("Reading", None, hidden=json_) as advance:
        report = perform(
            settings.dsn,
            settings.table,
            settings.common_options(),
            topics=topic or (),
            isolation=isolation.value,
            timeout_s=timeout,
            header=settings.record_header,
            on_progress=advance,
        )
    if json_:
        print_json(report.details())
    else:
        print_rich(render(report))
    verdict = report.verdict
    if not verdict.holds:
        raise VerificationFailed(answer(report), hint="the examples name the records and where they stand in Kafka")
    if not verdict.final:
        raise VerificationFailed(
            f"{verdict.pending:,} records still wait in the outbox", hint="drain it: `harvester start --until-empty`"
        )
    if strict and verdict.duplicates:
        raise VerificationFailed(f"{verdict.duplicates:,} deliveries are repeats, which --strict does not allow")
