"""`harvester pipeline drain`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from harvester_cli.options import duration, grouped
from harvester_cli.pipeline.options import Job, say
from harvester_cli.pump import progress
from harvester_cli.signals import stop_on_signal


@grouped
def drain(
    tasks: Annotated[
        int | None, typer.Option(min=1, help="Number of tasks that read and send [default: the cores of the cluster].")
    ] = None,
    lease: Annotated[
        str, typer.Option(metavar="DURATION", help="How long nobody else leads if this is killed.")
    ] = "60s",
    slice_records: Annotated[int, typer.Option(min=1, help="Maximum number of records in a slice.")] = 500_000,
    slice_mb: Annotated[
        int, typer.Option("--slice-mb", min=1, help="Approximate maximum size of a slice, in megabytes.")
    ] = 1024,
    max_records: Annotated[int | None, typer.Option(min=1, help="End after this many records.")] = None,
    leave: Annotated[int, typer.Option(min=0, help="End when no more than this many are left.")] = 0,
    purgers: Annotated[int, typer.Option(min=1, max=32, help="Sessions that purge what was sent.")] = 2,
    *,
    job: Job,
) -> None:
    """Move a backlog to Kafka using a cluster, in place of the harvesters, which wait in the meantime.

    It borrows the term under a lease, and returns it at the end. Whatever is killed, nothing is lost, and each key
    keeps its order; restarted, it continues, and repeats at most the slice that it was working on. SIGTERM and Ctrl-C
    end it after the current slice.
    """
    lasts = duration(lease, "--lease")
    with job.spark("drain") as spark:
        from harvester.pipeline.drain.job import DrainSettings, DrainSliceDone, run

        settings = DrainSettings(
            job.config, job.kafka, lease=lasts, tasks=tasks, slice_records=slice_records, slice_bytes=slice_mb << 20,
            records=max_records, leave=leave, purgers=purgers,
        )  # fmt: skip
        sent = 0
        with stop_on_signal() as stop, progress("Draining", None) as advance:

            def tell(done: DrainSliceDone) -> None:
                nonlocal sent
                sent += done.records
                if sys.stderr.isatty():
                    advance(sent, sent + done.left)
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
