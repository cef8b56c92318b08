"""`harvester pipeline replay`."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from harvester_cli.options import from_base64, grouped
from harvester_cli.pipeline import options
from harvester_cli.pipeline.options import Job, say
from harvester_cli.signals import stop_on_signal

if TYPE_CHECKING:
    from harvester.pipeline.replay_plan import ReplayRequest


@grouped
def replay(
    lake: options.LakeOption,
    format_: options.FormatOption = None,
    since: options.SinceOption = None,
    until: options.UntilOption = None,
    by: Annotated[
        Literal["published", "created"], typer.Option("--by", help="Whether times are Kafka's or the row's creation.")
    ] = "published",
    topic: Annotated[
        list[str] | None, typer.Option("--topic", help="Only this topic; may be given several times.")
    ] = None,
    key: Annotated[
        list[str] | None, typer.Option("--key", help="Only this key; may be given several times.")
    ] = None,
    key_base64: Annotated[
        list[str] | None, typer.Option("--key-base64", help="A key that is not text.")
    ] = None,
    to_topic: Annotated[
        str | None, typer.Option("--to-topic", metavar="TOPIC", help="Write everything to this topic.")
    ] = None,
    suffix: Annotated[
        str | None, typer.Option("--suffix", help="Write to the original topics' names plus this suffix.")
    ] = None,
    into_original: Annotated[
        bool, typer.Option("--into-original", help="Write to the topics from which the records came.")
    ] = False,
    as_new: Annotated[
        bool, typer.Option("--as-new", help="Omit the harvester's header, so that no consumer recognises repeats.")
    ] = False,
    rate: Annotated[
        float | None, typer.Option(help="Records per second [default: as fast as possible].")
    ] = None,
    slice_: Annotated[
        int | None,
        typer.Option(
            "--slice", min=1, metavar="RECORDS",
            help="Write this many at a time [default: a second's worth; without --rate 1,000,000].",
        ),
    ] = None,
    offsets_file: Annotated[
        Path | None,
        typer.Option(
            "--live-offsets", metavar="FILE", help="Write where live records follow: lines TOPIC,PARTITION,OFFSET."
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be written.")] = False,
    resume: Annotated[
        str | None, typer.Option(metavar="ID", help="Continue a replay that was begun earlier.")
    ] = None,
    *,
    job: Job,
) -> None:  # fmt: skip
    """Publish records of a lake again, in the order of each key, marked by the header harvester-replay.

    At least once: a killed replay continues with --resume, and repeats at most one slice. SIGTERM and Ctrl-C stop it
    after a slice.
    """
    if rate is not None and rate <= 0:
        raise typer.BadParameter("must be more than 0", param_hint="--rate")
    asked = (since, until, topic, key, key_base64, to_topic, suffix, into_original or None, as_new or None)
    if resume is not None and any(one is not None for one in asked):
        raise typer.BadParameter("continues the original request; give no other options", param_hint="--resume")
    request = None
    if resume is None:
        keys = [text.encode() for text in key or ()]
        keys += [from_base64(text, "--key-base64") for text in key_base64 or ()]
        destination = to_topic, suffix, into_original
        request = _request(options.period(since, until), by, topic or [], keys, destination, as_new)

    with job.spark("replay", "spark.speculation=false", format_=format_) as spark:
        from harvester.pipeline.replay import (
            ReplaySettings,
            ReplaySliceDone,
            begin,
            live_offsets,
            load,
            preview,
            run,
        )
        from harvester.pipeline.replay_plan import ReplayRate

        if request is not None:
            progress = begin(spark, lake, request)
        else:
            assert resume is not None
            progress = load(spark, lake, resume)
        if offsets_file is not None:
            rows = sorted(live_offsets(spark, lake, progress).items())
            text = "".join(f"{topic},{partition},{offset}\n" for (topic, partition), offset in rows)
            try:
                offsets_file.write_text(text, encoding="utf-8")
            except OSError as error:
                said = f"{offsets_file} cannot be written: {error.strerror}"
                raise typer.BadParameter(said, param_hint="--live-offsets") from error
        if dry_run:
            found = preview(spark, lake, progress)
            for one in found:
                print(
                    f"{one.topic} → {one.target}: {one.records:,} records ({one.tombstones:,} tombstones),"
                    f" {one.first.isoformat()} to {one.last.isoformat()}"
                )
            print(f"{sum(one.records for one in found):,} records would be written")
            return

        def tell(done: ReplaySliceDone) -> None:
            say(f"{done.records:,} of {done.total:,} records, {done.per_s:,.0f}/s")

        say(f"replay {progress.id} of version {progress.silver_version} of {lake}/silver")
        settings = ReplaySettings(lake, job.kafka, ReplayRate(rate, slice_))
        with stop_on_signal() as stop:
            done = run(spark, settings, progress, stop=stop.is_set, report=tell)
    rest = "" if done.finished else f"; the rest: --resume {done.id}"
    print(f"{done.records:,} records written by replay {done.id}{rest}")


def _request(
    period: tuple[datetime | None, datetime | None],
    by: str,
    topics: list[str],
    keys: list[bytes],
    destination: tuple[str | None, str | None, bool],
    as_new: bool,
) -> ReplayRequest:
    from harvester.pipeline.replay_plan import By, Destination, ReplayRequest, Selection

    if [bool(one) for one in destination].count(True) != 1:
        raise typer.BadParameter(
            "exactly one of these must say where to write", param_hint="--to-topic, --suffix, --into-original"
        )
    if destination[0] in topics:
        raise typer.BadParameter(
            f"records come from {destination[0]}; use --into-original to confirm", param_hint="--to-topic"
        )
    selection = Selection(*period, By(by), tuple(dict.fromkeys(topics)), tuple(dict.fromkeys(keys)))
    return ReplayRequest(selection, Destination(*destination), as_new)
