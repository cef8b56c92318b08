"""`harvester pump` writes records in known numbers per key; `harvester verify` compares Kafka with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from harvester.errors import VerificationFailed
from harvester_cli import output
from harvester_cli.options import JsonOption, LoggedOptions, grouped
from harvester_cli.output import print_json, print_rich
from harvester_cli.signals import stop_on_signal

if TYPE_CHECKING:
    from rich.console import RenderableType

    from harvester.verify.check import VerifyReport
    from harvester.verify.load import Load
    from harvester.verify.pump import PumpReport

INTERRUPTED = 130
DEFAULT_TOPIC = "pump"


@grouped
def pump(
    options: LoggedOptions,
    records: Annotated[int, typer.Option(help="Records to commit.")] = 10_000,
    keys: Annotated[int, typer.Option(help="Number of keys.")] = 1_000,
    rate: Annotated[float | None, typer.Option(help="Records per second [default: as fast as possible].")] = None,
    size: Annotated[int, typer.Option(help="Bytes of each value.")] = 200,
    rows_per_transaction: Annotated[int, typer.Option(help="Records in each transaction.")] = 1,
    writers: Annotated[int, typer.Option(help="Number of concurrent sessions.")] = 4,
    skew: Annotated[float, typer.Option(help="Zipf exponent over the keys; 0 is uniform.")] = 0.0,
    late: Annotated[
        float, typer.Option(help="Fraction of transactions that stay open while larger ids are committed.")
    ] = 0.0,
    rollbacks: Annotated[float, typer.Option(help="Fraction of transactions that are rolled back.")] = 0.0,
    topic: Annotated[
        list[str] | None, typer.Option(help=f"Topic; several share the keys (default: {DEFAULT_TOPIC}).")
    ] = None,
    headers: Annotated[int, typer.Option(help="Headers of each record.")] = 1,
    seed: Annotated[int, typer.Option(help="The same seed plans the same load.")] = 1,
    append: Annotated[bool, typer.Option("--append", help="Continue from the counts of an earlier pump.")] = False,
    json_: JsonOption = False,
) -> None:
    """Write records into the outbox, with several sessions at once, and count them per key in <outbox>_pump.

    Counts and records are committed in the same transactions, so the counts are the truth with which `verify` compares
    Kafka. Ctrl-C ends it early, with everything committed so far counted.
    """
    settings = options.load()

    from harvester.verify.load import Load
    from harvester.verify.pump import pump as perform

    planned = Load(
        records=records,
        topics=tuple(topic or [DEFAULT_TOPIC]),
        keys=keys,
        rate_per_s=rate,
        value_bytes=size,
        rows_per_transaction=rows_per_transaction,
        writers=writers,
        skew=skew,
        late=late,
        rollbacks=rollbacks,
        headers=headers,
        seed=seed,
    )
    with stop_on_signal() as stop, progress("Pumping", planned.records, hidden=json_) as advance:
        report = perform(settings.dsn, settings.table, planned, append=append, stop=stop, on_progress=advance)
    if json_:
        rate_per_s = round(report.rate_per_s, 1)
        print_json({**asdict(report), "duration_s": round(report.duration_s, 3), "rate_per_s": rate_per_s})
    else:
        output.console().print(_sentence(report, planned), highlight=False, soft_wrap=True)
    if not report.complete:
        raise typer.Exit(INTERRUPTED)


@contextmanager
def progress(what: str, total: int | None, *, hidden: bool = False) -> Iterator[Callable[..., None]]:
    """A progress bar on standard error if that is a terminal; yields a function to call with records and a new
    total.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = output.console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:>10}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=hidden or not console.is_terminal) as bar:
        task = bar.add_task(what, total=total, rate="")

        def advance(records: int, total: int | None = total) -> None:
            elapsed_s = bar.tasks[0].elapsed
            rate = f"{records / elapsed_s:,.0f}/s" if elapsed_s else ""
            bar.update(task, completed=records, total=total, rate=rate)

        yield advance


def _sentence(report: PumpReport, planned: Load) -> str:
    parts = [
        f"{report.records:,} records committed in {report.transactions:,} transactions,"
        f" {report.duration_s:.1f} s ({report.rate_per_s:,.0f}/s)"
    ]
    if planned.late:
        parts.append(f"{report.late:,} transactions held open, {report.overtaken:,} of them overtaken by larger ids")
    if planned.rollbacks:
        parts.append(f"{report.rolled_back_records:,} records rolled back")
    if not report.complete:
        parts.append(f"stopped before all {planned.records:,} were written")
    return "; ".join(parts)


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
    settings = options.load_for_kafka()

    from harvester.verify.check import verify as perform

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
