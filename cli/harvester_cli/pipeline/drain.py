"""`harvester pipeline drain`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from harvester_cli import output
from harvester_cli.pipeline import options
from harvester_cli.pipeline.options import Job, say, with_job
from harvester_cli.pump import stop_on_signal


@with_job
def drain(
    job: Job,
    tasks: Annotated[
        int | None, typer.Option(min=1, help="Read and send in so many [default: the cores of the cluster].")
    ] = None,
    lease: Annotated[
        str, typer.Option(metavar="DURATION", help="For so long nobody else leads, if this is killed.")
    ] = "60s",
    slice_records: Annotated[int, typer.Option(min=1, help="Most records of a slice.")] = 500_000,
    slice_mb: Annotated[int, typer.Option("--slice-mb", min=1, help="Most megabytes of a slice, about.")] = 1024,
    max_records: Annotated[int | None, typer.Option(min=1, help="End after so many records.")] = None,
    leave: Annotated[int, typer.Option(min=0, help="End when no more than so many are left.")] = 0,
    purgers: Annotated[int, typer.Option(min=1, max=32, help="Sessions that purge what was sent.")] = 2,
) -> None:
    """Move a backlog to Kafka by a cluster, in the place of the harvesters, which wait meanwhile.

    It takes the term from them under a lease, and gives it back at the end. Whatever is killed, nothing is lost, and
    each key keeps its order; started again it goes on, and repeats no more than the slice it was at. SIGTERM and
    Ctrl-C end it after that slice.
    """
    lasts = options.duration(lease, "--lease")
    with job.spark("drain") as spark:
        from harvester.pipeline.drain.job import DrainSettings, DrainSliceDone, run

        settings = DrainSettings(
            job.config, job.kafka, lease=lasts, tasks=tasks, slice_records=slice_records, slice_bytes=slice_mb << 20,
            records=max_records, leave=leave, purgers=purgers,
        )  # fmt: skip
        with stop_on_signal() as stop, _bar() as advance:

            def tell(done: DrainSliceDone) -> None:
                if advance is not None:
                    advance(done.records, done.left)
                    return
                aside = f", {done.quarantined:,} to quarantine" if done.quarantined else ""
                say(
                    f"slice {done.number}: {done.records:,} records, {done.records / done.took_s:,.0f}/s{aside},"
                    f" about {done.left:,} left"
                )

            report = run(spark, settings, stop=stop.is_set, progress=tell, waiting=say)
    if not report.taken:
        print("the term was not taken: nothing was sent")
        return
    rate = f" ({report.records / report.took_s:,.0f}/s)" if report.took_s else ""
    aside = f", {report.quarantined:,} moved to quarantine" if report.quarantined else ""
    print(f"{report.records:,} records sent in {report.slices:,} slices{rate}{aside}")


@contextmanager
def _bar() -> Iterator[Callable[[int, int], None] | None]:
    """On a terminal: a bar, and what to call after each slice with its records and what is left. Else None."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = output.console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (TextColumn("Draining"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]:>10}"))
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
        task = bar.add_task("", total=None, rate="")

        def advance(records: int, left: int) -> None:
            sent, elapsed_s = int(bar.tasks[0].completed) + records, bar.tasks[0].elapsed
            rate = f"{sent / elapsed_s:,.0f}/s" if elapsed_s else ""
            bar.update(task, completed=sent, total=sent + left, rate=rate)

        yield advance
