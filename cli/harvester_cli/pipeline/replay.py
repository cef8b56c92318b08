"""`harvester pipeline replay`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from harvester_cli.coordination_options import BootstrapOption
from harvester_cli.options import ConfigOption, LogLevelOption, SetOption
from harvester_cli.pipeline.options import (
    ConfOption,
    KafkaOption,
    LakeOption,
    MasterOption,
    SinceOption,
    UntilOption,
    absolute,
    configuration,
    java_options,
    moment,
    say,
    spark_settings,
)

if TYPE_CHECKING:
    from harvester.pipeline.replay.plan import ReplayRequest


def replay(
    lake: LakeOption,
    config: ConfigOption = None,
    set_: SetOption = None,
    log_level: LogLevelOption = None,
    bootstrap: BootstrapOption = None,
    since: SinceOption = None,
    until: UntilOption = None,
    by: Annotated[
        str, typer.Option("--by", metavar="published|created", help="Times are Kafka's, or of the row's creation.")
    ] = "published",
    topic: Annotated[
        list[str] | None, typer.Option("--topic", help="Only of this one; several times.", show_default=False)
    ] = None,
    key: Annotated[
        list[str] | None, typer.Option("--key", help="Only of this one; several times.", show_default=False)
    ] = None,
    key_base64: Annotated[
        list[str] | None, typer.Option("--key-base64", help="A key that is no text.", show_default=False)
    ] = None,
    to_topic: Annotated[
        str | None, typer.Option("--to-topic", metavar="TOPIC", help="Write all into this one.", show_default=False)
    ] = None,
    suffix: Annotated[
        str | None, typer.Option("--suffix", help="Write into topics of this longer name.", show_default=False)
    ] = None,
    into_original: Annotated[
        bool, typer.Option("--into-original", help="Write into the topics that the records came from.")
    ] = False,
    as_new: Annotated[
        bool, typer.Option("--as-new", help="Leave out the harvester's header: no consumer knows them as repeats.")
    ] = False,
    rate: Annotated[
        float | None, typer.Option(help="Records per second; as fast as it goes if left out.", show_default=False)
    ] = None,
    slice_: Annotated[
        int | None,
        typer.Option(
            "--slice", min=1, metavar="RECORDS", show_default=False,
            help="Write so many at a time [default: a second's worth; without --rate 1,000,000].",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be written.")] = False,
    resume: Annotated[
        str | None, typer.Option(metavar="ID", help="Go on with one that was begun before.", show_default=False)
    ] = None,
    master: MasterOption = None,
    conf: ConfOption = None,
    kafka: KafkaOption = None,
) -> None:  # fmt: skip
    """Publish records of a lake again, in the order of each key, marked by the header harvester-replay.

    At least once: one that is killed goes on with --resume, and repeats a slice at most. SIGTERM and Ctrl-C stop it
    after a slice.
    """
    from harvester.pipeline.session import session

    if rate is not None and rate <= 0:
        raise typer.BadParameter("has to be more than 0", param_hint="--rate")
    asked = (since, until, topic, key, key_base64, to_topic, suffix, into_original or None, as_new or None)
    if resume is not None and any(one is not None for one in asked):
        raise typer.BadParameter("goes on with what was asked for then; name nothing else", param_hint="--resume")
    request = None
    if resume is None:
        keys = [*(text.encode() for text in key or ()), *map(_decoded, key_base64 or ())]
        request = _request(since, until, by, topic, keys, to_topic, suffix, into_original, as_new)
    loaded = configuration(config, set_, bootstrap)
    options = java_options(loaded, kafka)

    spark_options = spark_settings("replay", master, [*(conf or ()), "spark.speculation=false"], log_level)
    with session(spark_options, progress=say) as spark:
        from harvester_cli.pump import stop_on_signal

        from harvester.pipeline.replay import job
        from harvester.pipeline.replay.plan import ReplayRate

        root = absolute(lake)
        if request is not None:
            progress = job.begin(spark, root, request)
        else:
            assert resume is not None
            progress = job.load(spark, root, resume)
        if dry_run:
            found = job.preview(spark, root, progress)
            for one in found:
                print(
                    f"{one.topic} → {one.target}: {one.records:,} records ({one.tombstones:,} tombstones),"
                    f" {one.first.isoformat()} to {one.last.isoformat()}"
                )
            print(f"{sum(one.records for one in found):,} records would be written")
            return

        def tell(done: job.ReplaySliceDone) -> None:
            say(f"{done.records:,} of {done.total:,} records, {done.per_s:,.0f}/s")

        say(f"replay {progress.id} of version {progress.silver_version} of {root}/silver")
        settings = job.ReplaySettings(root, options, ReplayRate(rate, slice_), loaded.record_header)
        with stop_on_signal() as stop:
            done = job.run(spark, settings, progress, stop=stop.is_set, report=tell)
    rest = "" if done.finished else f"; the rest: --resume {done.id}"
    print(f"{done.records:,} records written by replay {done.id}{rest}")


def _request(
    since: str | None,
    until: str | None,
    by: str,
    topics: list[str] | None,
    keys: list[bytes],
    to_topic: str | None,
    suffix: str | None,
    into_original: bool,
    as_new: bool,
) -> ReplayRequest:
    from datetime import UTC, datetime

    from harvester.pipeline.replay.plan import By, Destination, ReplayRequest, Selection

    if by not in set(By):
        raise typer.BadParameter(f"{by!r} is none of {', '.join(By)}", param_hint="--by")
    if [bool(to_topic), bool(suffix), into_original].count(True) != 1:
        raise typer.BadParameter("one of them says where to write", param_hint="--to-topic, --suffix, --into-original")
    now = datetime.now(UTC)
    first, last = moment(since, now, "--from"), moment(until, now, "--until")
    if first is not None and last is not None and not first < last:
        raise typer.BadParameter("is not later than --from", param_hint="--until")
    named = tuple(dict.fromkeys(topics or ()))
    if to_topic in named:
        raise typer.BadParameter(
            f"records come from {to_topic}; --into-original says that it is meant", param_hint="--to-topic"
        )
    selection = Selection(first, last, By(by), named, tuple(dict.fromkeys(keys)))
    return ReplayRequest(selection, Destination(to_topic, suffix, into_original), as_new)


def _decoded(text: str) -> bytes:
    import base64
    import binascii

    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise typer.BadParameter(f"is no base64: {error}", param_hint="--key-base64") from error
