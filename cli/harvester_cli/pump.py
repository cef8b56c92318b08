"""`harvester pump`: write records in known numbers per key, for `harvester verify` to check."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from harvester_cli import output
from harvester_cli.options import JsonOption, LoggedOptions, grouped
from harvester_cli.output import print_json
from harvester_cli.signals import stop_on_signal

if TYPE_CHECKING:
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
