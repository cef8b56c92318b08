"""`harvester pipeline metrics`."""

from __future__ import annotations

from typing import Annotated

import typer
from harvester_cli.options import duration, grouped
from harvester_cli.pipeline import options
from harvester_cli.pipeline.options import Job, say
from harvester_cli.signals import stop_on_signal


@grouped
def metrics(
    lake: options.LakeOption,
    to: Annotated[str | None, options.tables("Location of the metrics' tables [default: that of the lake].")] = None,
    format_: options.FormatOption = None,
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
        from harvester.pipeline.metrics.job import MetricsSettings, run

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
