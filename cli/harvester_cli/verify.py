"""`harvester verify`: compare what the pump committed with the contents of Kafka."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from harvester.errors import VerificationFailed
from harvester_cli.options import JsonOption, LoggedOptions, grouped
from harvester_cli.output import print_json, print_rich

if TYPE_CHECKING:
    from rich.console import RenderableType

    from harvester.verify.check import VerifyReport


@grouped
def verify(
    options: LoggedOptions,
    isolation: Annotated[
        Literal["read_committed", "read_uncommitted"],
        typer.Option(help="Whether to read records of open and aborted transactions."),
    ] = "read_committed",
    topic: Annotated[
        list[str] | None, typer.Option(help="Topic to read; may be given several times (default: the pump's).")
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for further records.")] = 30.0,
    strict: Annotated[bool, typer.Option("--strict", help="Duplicates also fail the verdict.")] = False,
    json_: JsonOption = False,
) -> None:
    """Read the topics to their end and compare them with the counts in <outbox>_pump.

    Exits with 0 only if no record is lost, out of order, unexpected or still waiting in the outbox.
    """
    settings = options.load()

    from harvester.verify.check import verify as perform
    from harvester_cli.pump import progress

    with progress("Reading", None, hidden=json_) as advance:
        report = perform(
            settings.dsn,
            settings.table,
            settings.common_options(),
            topics=topic or (),
            isolation=isolation,
            timeout_s=timeout,
            header=settings.record_header,
            claim_check=settings.oversize.store_settings,
            on_progress=advance,
        )
    if json_:
        print_json(report.details())
    else:
        print_rich(render(report))
    verdict = report.verdict
    if not verdict.holds:
        raise VerificationFailed(answer(report), hint="the examples name the records and their positions in Kafka")
    if not verdict.final:
        raise VerificationFailed(
            f"{verdict.pending:,} records still wait in the outbox", hint="drain it: `harvester start --until-empty`"
        )
    if strict and verdict.duplicates:
        raise VerificationFailed(f"{verdict.duplicates:,} deliveries are repeats, which --strict does not allow")


# A record that Kafka refused and that was put back later leaves such a number, as does an aborted one.
_BY_HEADERS = "From the headers alone, which do not show what happened to a number; the verdict above does:"


def render(report: VerifyReport) -> RenderableType:
    """Pure: report in, rich renderable out."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    verdict, timing = report.verdict, report.timing
    table = Table(title="Verdict", title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(justify="left")
    table.add_column(justify="right")
    table.add_column(justify="left", style="dim")
    rows: tuple[tuple[str, int, bool, str], ...] = (
        ("inserted", verdict.inserted, False, "committed rows, according to the side table"),
        ("delivered", verdict.delivered, False, "of these, found in Kafka"),
        ("lost", verdict.lost, True, "in neither Kafka, quarantine nor outbox"),
        ("duplicates", verdict.duplicates, False, "deliveries beyond a record's first"),
        ("order violations", verdict.order_violations, True, "records that came after a successor"),
        ("quarantined", verdict.quarantined, False, "set aside with their error"),
        ("pending", verdict.pending, False, "still in the outbox"),
        ("unexpected", verdict.unexpected, True, "records that were never committed"),
        ("scattered keys", verdict.scattered, True, "keys found in several partitions"),
    )
    for name, count, must_be_zero, meaning in rows:
        style = ("bold red" if count else "green") if must_be_zero else ""
        table.add_row(name, Text(f"{count:,}", style=style), meaning)
    if (sequenced := report.sequenced).records:  # informational: only the counts know what was committed
        table.add_row("repeated ids", f"{sequenced.repeats:,}", "according to the records' headers alone")
        table.add_row("open numbers", f"{sequenced.open:,}", "missing in the last sequence of a lane")
        table.add_row("clashing numbers", f"{sequenced.clashes:,}", "ids that share a number with another")
    table.add_row("rate", _figure(timing.rate_per_s, "/s"), "from first to last record in Kafka")
    table.add_row("p50", _figure(timing.p50_ms, " ms"), "row inserted to timestamp in Kafka")
    table.add_row("p99", _figure(timing.p99_ms, " ms"), "")
    examples = []
    for title, found in (("Examples", report.examples), (_BY_HEADERS, report.sequenced.examples)):
        examples += [Text(title)] if found else []
        examples += [Text(f"  {example}", overflow="fold") for example in found]
    return Group(table, Text(answer(report)), *examples)


def answer(report: VerifyReport) -> str:
    """The verdict in one sentence."""
    verdict = report.verdict
    wrong = [
        f"{count:,} {name}"
        for count, name in (
            (verdict.lost, "lost"),
            (verdict.order_violations, "out of order"),
            (verdict.unexpected, "unexpected"),
            (verdict.scattered, "keys in several partitions"),
        )
        if count
    ]
    if wrong:
        return f"The guarantees do not hold: {', '.join(wrong)}."
    if not verdict.final:
        return f"Nothing is lost or out of order so far; {verdict.pending:,} records wait in the outbox."
    return "Nothing is lost or out of order."


def _figure(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:,.1f}{unit}"
