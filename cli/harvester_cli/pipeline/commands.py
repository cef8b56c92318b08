"""`harvester pipeline`: jobs on Apache Spark that turn the harvested topics into tables."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from harvester_cli.options import duration, grouped
from harvester_cli.pipeline.audit import audit
from harvester_cli.pipeline.lake import erase, lake, rebuild, views
from harvester_cli.pipeline.options import FormatOption, Job, LakeOption, say, tables
from harvester_cli.pipeline.replay import replay
from harvester_cli.signals import stop_on_signal
from harvester_cli.verify import progress

app = typer.Typer(no_args_is_help=True, help="Jobs on Apache Spark over the harvested topics.")

AvroOption = Annotated[bool, typer.Option("--avro", help="Also the connector for Avro, which `lake --typed` needs.")]


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


@grouped
def metrics(
    lake: LakeOption,
    to: Annotated[str | None, tables("Location of the metrics' tables [default: that of the lake].")] = None,
    format_: FormatOption = None,
    topic: Annotated[
        list[str] | None, typer.Option("--topic", help="Only this topic; may be given several times.")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Exit when the tables are up to date.")] = False,
    every: Annotated[str, typer.Option(metavar="DURATION", help="How long to wait between two runs.")] = "1m",
    window: Annotated[str, typer.Option(metavar="DURATION", help="Length of a window, in whole seconds.")] = "1m",
    keys: Annotated[
        int, typer.Option(min=0, help="How many of a window's hottest keys to write; 0: do not distinguish keys.")
    ] = 10,
    *,
    job: Job,
) -> None:
    """Maintain a table of activity in a lake's topics, by window: throughput, latency, lanes and the hottest keys.

    Each run counts the hours again of which the lake has new records. SIGTERM and Ctrl-C stop it after a run.
    """
    every_s, window_s = (
        duration(text, option).total_seconds() for text, option in ((every, "--every"), (window, "--window"))
    )
    if window_s < 1 or window_s != int(window_s):
        raise typer.BadParameter("must be whole seconds, at least one", param_hint="--window")

    with job.spark("metrics", format_=format_) as spark:
        from harvester.pipeline.errors import PipelineError
        from harvester.pipeline.metrics import MetricsSettings, run

        settings = MetricsSettings(lake, to, tuple(sorted({*(topic or ())})), int(window_s), keys)
        with stop_on_signal() as stop:
            while not stop.is_set():
                try:
                    done = run(spark, settings)
                except PipelineError:
                    if stop.is_set():  # a signal to the process group also ends the Java process
                        break
                    raise
                if done.hours or once:
                    say(f"hours counted: {done.hours:,}; rows of `metrics`: {done.rows:,}; records: {done.records:,}")
                if once or stop.wait(every_s):
                    break


def packages(format_: FormatOption = None, avro: AvroOption = False) -> None:
    """Print the connectors for the installed PySpark, for `spark-submit --packages`."""
    from harvester.pipeline.session import DELTA, connectors, spark_version

    print(",".join(str(one) for one in connectors(spark_version(), format_ or DELTA, avro=avro)))


def fetch(format_: FormatOption = None, avro: AvroOption = False) -> None:
    """Download the connectors into the cache now, so that a later job needs no network."""
    from harvester.pipeline.session import DELTA, connector_jars, spark_version

    connector_jars(spark_version(), format_ or DELTA, avro=avro, progress=say)


app.command("lake")(lake)
app.command("rebuild")(rebuild)
app.command("views")(views)
app.command("erase")(erase)
app.command("drain")(drain)
app.command("replay")(replay)
app.command("metrics")(metrics)
app.command("audit")(audit)
app.command("packages")(packages)
app.command("fetch")(fetch)
