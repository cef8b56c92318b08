"""`harvester pipeline metrics`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from harvester_cli.options import duration, grouped
from harvester_cli.pipeline import options
from harvester_cli.pipeline.options import Job, say
from harvester_cli.signals import stop_on_signal

if TYPE_CHECKING:
    from collections.abc import Mapping


@grouped
def metrics(
    topic: options.TopicsOption,
    to: options.TablesOption,
    format_: options.FormatOption = None,
    once: options.OnceOption = False,
    every: options.EveryOption = "10s",
    window: Annotated[str, typer.Option(metavar="DURATION", help="Length of a window, in whole seconds.")] = "1m",
    late: Annotated[
        str,
        typer.Option(metavar="DURATION", help="How far a record may be behind the newest one and still be counted."),
    ] = "10m",
    keys: Annotated[
        int, typer.Option(min=0, help="How many of a window's hottest keys to write; 0: do not distinguish keys.")
    ] = 10,
    max_records: Annotated[
        int | None, typer.Option(min=1, help="Maximum per batch; this divides a backlog, which makes records late.")
    ] = None,
    compact_every: options.CompactOption = 50,
    checkpoint: Annotated[
        str | None, options.directory("Checkpoint of the stream [default: checkpoint-metrics, next to the tables].")
    ] = None,
    *,
    job: Job,
) -> None:
    """Maintain a table of activity in topics, by window: throughput, latency, lanes and the hottest keys.

    Each window is written once, when it closes. Restart it with the same directory; SIGTERM and Ctrl-C stop it.
    """
    trigger_s, window_s, late_s = (
        duration(text, option).total_seconds()
        for text, option in ((every, "--every"), (window, "--window"), (late, "--late"))
    )
    if window_s < 1 or window_s != int(window_s):
        raise typer.BadParameter("must be whole seconds, at least one", param_hint="--window")

    with job.spark("metrics", format_=format_) as spark:
        from harvester.pipeline.metrics.job import ALL, MetricsBatchDone, MetricsSettings, run

        settings = MetricsSettings(
            topics=tuple(dict.fromkeys(topic)), root=to, kafka=job.kafka,
            checkpoint=checkpoint, header=job.config.record_header, once=once,
            trigger_s=trigger_s, window_s=int(window_s), late_s=late_s, most_keys=keys,
            most_records=max_records or ALL, compact_every=compact_every,
        )  # fmt: skip

        def tell(done: MetricsBatchDone) -> None:
            say(
                f"batch {done.batch}: {done.records:,} records, {done.per_s:,.0f}/s, {done.windows:,} windows written,"
                f" {done.open_counts:,} counts of open ones{_late(done.late)}"
            )

        with stop_on_signal() as stop:
            total = run(spark, settings, stop=stop.is_set, progress=tell)
    print(
        f"{total.records:,} records read, {total.windows:,} windows written into {settings.root}/metrics"
        f"{_late(total.late)}; {total.open_counts:,} counts of windows that are open"
    )


def _late(late: Mapping[str, int]) -> str:
    listed = ", ".join(f"{count:,} of {topic}" for topic, count in sorted(late.items()))
    return f", late and not counted: {listed}" if listed else ""
