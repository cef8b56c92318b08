"""`harvester pipeline lake`."""

from __future__ import annotations

import json
import math
import re
from contextlib import nullcontext
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from harvester_cli.options import duration, from_base64, grouped
from harvester_cli.pipeline import options
from harvester_cli.pipeline.options import Job, say
from harvester_cli.signals import stop_on_signal


@grouped
def lake(
    to: options.TablesOption,
    topic: Annotated[list[str] | None, typer.Option(help="May be given several times.")] = None,
    topic_pattern: Annotated[
        str | None,
        typer.Option(metavar="REGEX", help="Also topics whose whole name matches, including those created later."),
    ] = None,
    format_: options.FormatOption = None,
    once: options.OnceOption = False,
    every: options.EveryOption = "10s",
    max_records: Annotated[int, typer.Option(min=1, help="Maximum per batch.")] = 2_000_000,
    source: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="An option of Spark's Kafka source, such as minPartitions."),
    ] = None,
    compact_every: options.CompactOption = 50,
    fold_every: Annotated[
        str, typer.Option(metavar="DURATION", help="How often to fold new states into the table `current`, or `never`.")
    ] = "10m",
    checkpoint: Annotated[
        str | None,
        options.directory(
            "Checkpoint of the stream [default: checkpoint, next to the tables; required for a new lake in a schema]."
        ),
    ] = None,
    json_schema: Annotated[
        list[str] | None,
        typer.Option(metavar="TOPIC=DDL", help='Values of a topic as columns: "orders=total INT, customer STRING".'),
    ] = None,
    typed: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TOPIC[=DDL]",
            help="Avro, Protobuf or JSON values framed by a schema registry as columns: its schema's, or these.",
        ),
    ] = None,
    registry: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="The registry for --typed: an option of its client, such as url=https://…; ${VARIABLE} is replaced.",
        ),
    ] = None,
    accept_loss: Annotated[
        bool,
        typer.Option(
            "--accept-loss", help="Continue after records that Kafka no longer has; the table `losses` lists them."
        ),
    ] = False,
    retire_topic: Annotated[
        list[str] | None,
        typer.Option(metavar="TOPIC", help="Stop reading a topic that no longer exists, or is no longer wanted."),
    ] = None,
    adopt: Annotated[
        bool, typer.Option("--adopt", help="Create a new checkpoint from the tables, if theirs is lost or unreadable.")
    ] = False,
    start_at: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Where a new lake starts: ISO 8601, or a duration before now: 2h."),
    ] = None,
    listen: options.ListenOption = None,
    *,
    job: Job,
) -> None:
    """Maintain tables of topics: each (incarnation, id) once, its repeats, the state of each key, and rejects.

    Exactly once across kill and restart: restart it with the same directory. SIGTERM and Ctrl-C stop it.
    """
    trigger_s = duration(every, "--every").total_seconds()
    fold_s = math.inf if fold_every == "never" else duration(fold_every, "--fold-every").total_seconds()
    payloads, named = options.pairs(json_schema, "--json-schema"), tuple(dict.fromkeys(topic or ()))
    if not named and topic_pattern is None:
        raise typer.BadParameter("name at least one, or a --topic-pattern", param_hint="--topic")
    try:
        wanted = re.compile(topic_pattern or "")
    except re.error as error:
        raise typer.BadParameter(f"is no regular expression: {error}", param_hint="--topic-pattern") from error
    framed = {name: ddl or None for name, _, ddl in (one.partition("=") for one in typed or ())}
    for option, given in (("--json-schema", payloads), ("--typed", framed)):
        if unknown := sorted(one for one in given.keys() - set(named) if not wanted.fullmatch(one)):
            raise typer.BadParameter(f"{', '.join(unknown)} is not a --topic", param_hint=option)
    if twice := sorted(payloads.keys() & framed.keys()):
        raise typer.BadParameter(f"{', '.join(twice)} also has a --json-schema", param_hint="--typed")
    if registry and not framed:
        raise typer.BadParameter("no topic is --typed", param_hint="--registry")
    if both := sorted({*(retire_topic or ())} & {*named}):
        raise typer.BadParameter(f"{', '.join(both)} is also a --topic", param_hint="--retire-topic")
    begin, _ = options.period(start_at, None, "--start-at")
    tuning = options.pairs(source, "--source")

    from harvester.http import lake_metrics
    from harvester.pipeline.session import AVRO
    from harvester.pipeline.source import TUNING

    if strange := sorted(tuning.keys() - set(TUNING)):
        raise typer.BadParameter(f"{strange[0]} is not one of {', '.join(TUNING)}", param_hint="--source")

    client = options.schema_registry(registry) if framed else None
    avro = [f"{AVRO}=true"] if framed else []

    with (
        nullcontext() if listen is None else lake_metrics(listen, say) as metrics,
        job.spark("lake", *avro, format_=format_) as spark,
    ):
        from harvester.pipeline.lake.job import BatchDone, LakeSettings, run
        from harvester.pipeline.lake.recovery import Recovery
        from harvester.pipeline.lake.silver import from_ddl

        try:
            schemas = {name: from_ddl(ddl) for name, ddl in payloads.items()}
            columns = {name: ddl and from_ddl(ddl) for name, ddl in framed.items()}
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--json-schema, --typed") from error
        settings = LakeSettings(
            topics=named, root=to, kafka=job.kafka, checkpoint=checkpoint,
            header=job.config.record_header, once=once, trigger_s=trigger_s, most_records=max_records,
            compact_every=compact_every, fold_s=fold_s, payloads=schemas,
            recovery=Recovery(accept_loss, tuple(retire_topic or ()), adopt, begin),
            pattern=topic_pattern, options=tuning, typed=columns, registry=client,
        )  # fmt: skip

        def tell(done: BatchDone) -> None:
            counts = ((done.repeats, "repeats"), (done.rejects, "rejected"), (done.behind, "behind"))
            others = "".join(f", {count:,} {what}" for count, what in counts if count)
            say(f"batch {done.batch}: {done.records:,} records, {done.per_s:,.0f}/s{others}")
            if metrics is not None:
                metrics.take(
                    records=done.records, repeats=done.repeats, rejects=done.rejects, seconds=done.seconds,
                    behind=done.behind,
                )  # fmt: skip

        with stop_on_signal() as stop:
            records = run(spark, settings, stop=stop.is_set, progress=tell, say=say)
    print(f"{records:,} records read into {settings.root}")


@grouped
def rebuild(
    old: Annotated[str, options.directory("A lake of an earlier version; its job must have ended.", "--from")],
    to: Annotated[str, options.directory("A new directory.", "--to")],
    checkpoint: Annotated[str | None, options.directory("The old lake's [default: next to its tables].")] = None,
    *,
    job: Job,
) -> None:
    """Create a lake of this version from one of an earlier version; `lake --to` the new one then continues.

    The old one is only read. To start again after a failure, use another new directory.
    """
    with job.spark("rebuild") as spark:
        from harvester.pipeline.lake.upkeep import rebuild as run
        from harvester.pipeline.session import clear_errors

        with clear_errors("the rebuild", hint="remove the new directory and start over"):
            records = run(spark, old, to, checkpoint)
    print(f"{records:,} records in {to}")


@grouped
def erase(
    lake: Annotated[str, options.tables("The tables of `pipeline lake`; its job must have ended.")],
    format_: options.FormatOption = None,
    key: Annotated[str | None, typer.Option(help="The key to erase.")] = None,
    key_base64: Annotated[
        str | None, typer.Option("--key-base64", metavar="BASE64", help="The key, if it is not text.")
    ] = None,
    topic: Annotated[list[str] | None, typer.Option(help="Only in these topics; may be given several times.")] = None,
    database: Annotated[
        bool, typer.Option("--database/--no-database", help="Also from the outbox's archive and quarantine.")
    ] = True,
    certificate: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the certificate to this file [default: standard output].")
    ] = None,
    checkpoint: Annotated[
        str | None, options.directory("Checkpoint of the lake [default: next to the tables].")
    ] = None,
    *,
    job: Job,
) -> None:
    """Erase a key from every table of a lake, and from archive and quarantine; VACUUM; report what was removed where.

    Earlier versions of the tables can no longer be read afterwards. Can be repeated after a failure.
    """
    if (key is None) == (key_base64 is None):
        raise typer.BadParameter("give the key either as text or as base64", param_hint="--key, --key-base64")
    raw = key.encode() if key is not None else from_base64(key_base64 or "", "--key-base64")
    options.check_writable(certificate, "--certificate")
    outbox = (job.config.data_source, job.config.table) if database else None
    with job.spark("erase", format_=format_) as spark:
        from harvester.pipeline.lake.erase import erase as run
        from harvester.pipeline.session import clear_errors

        with clear_errors("the erasure", hint="repeat it"):
            done = run(spark, lake, raw, tuple(dict.fromkeys(topic or ())), checkpoint, outbox, say)
    text = json.dumps(asdict(done), default=datetime.isoformat, indent=2)
    if certificate is None:
        print(text)
        return
    try:
        certificate.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        from harvester.pipeline.errors import PipelineError

        print(text)  # a repeat would have nothing left to report
        raise PipelineError(
            f"the certificate cannot be written: {error}", hint="it is on standard output; the key was erased"
        ) from error


@grouped
def views(
    lake: options.LakeOption,
    format_: options.FormatOption = None,
    as_of: Annotated[
        str | None,
        typer.Option(metavar="CUT|latest", help="As of one moment of the database: a `batch` in the table `cuts`."),
    ] = None,
    *,
    job: Job,
) -> None:
    """Print SQL for your catalog: the views `bronze`, `deliveries`, `current` and `history` of a lake.

    Old SQL gives the same rows. But its `current` reads everything folded since: print it again from time to time.
    With --as-of: `deliveries_as_of`, `current_as_of`, `history_as_of`, which always give the same rows.
    """
    if as_of is not None and as_of != "latest" and not as_of.isdecimal():
        raise typer.BadParameter("is neither the number of a batch nor `latest`", param_hint="--as-of")
    with job.spark("views", format_=format_) as spark:
        from harvester.pipeline.formats import open_store
        from harvester.pipeline.lake.job import queries
        from harvester.pipeline.session import clear_errors

        with clear_errors("the views"):
            store = open_store(spark, lake)
            found = queries(store, as_of)
    for name, value in store.settings().items():
        print(f"SET {name}={value};")
    for name, query in found.items():
        print(f"CREATE OR REPLACE VIEW {name} AS {query};")
