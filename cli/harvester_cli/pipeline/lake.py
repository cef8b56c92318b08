"""`harvester pipeline lake`."""

from __future__ import annotations

from typing import Annotated

import typer
from harvester_cli.coordination_options import BootstrapOption
from harvester_cli.options import ConfigOption, LogLevelOption, SetOption
from harvester_cli.pipeline.options import (
    CompactOption,
    ConfOption,
    EveryOption,
    KafkaOption,
    MasterOption,
    OnceOption,
    TablesOption,
    TopicsOption,
    absolute,
    configuration,
    java_options,
    pairs,
    say,
    seconds,
    spark_settings,
)


def lake(
    topic: TopicsOption,
    to: TablesOption,
    config: ConfigOption = None,
    set_: SetOption = None,
    log_level: LogLevelOption = None,
    bootstrap: BootstrapOption = None,
    once: OnceOption = False,
    every: EveryOption = "10s",
    max_records: Annotated[int, typer.Option(min=1, help="In a batch.")] = 5_000_000,
    compact_every: CompactOption = 50,
    checkpoint: Annotated[
        str | None, typer.Option(metavar="DIRECTORY", help="Of the stream [default: checkpoint, beside the tables].")
    ] = None,
    json_schema: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TOPIC=DDL",
            help='Values of a topic as columns: "orders=total INT, customer STRING".',
            show_default=False,
        ),
    ] = None,
    master: MasterOption = None,
    conf: ConfOption = None,
    kafka: KafkaOption = None,
) -> None:
    """Keep Delta tables of topics: every record, each (incarnation, id) once, the state of each key, and rejects.

    Exactly once across kill and restart: start it again with the same directory. SIGTERM and Ctrl-C stop it.
    """
    from harvester.pipeline.session import session

    trigger_s = seconds(every, "--every")
    payloads = pairs(json_schema, "--json-schema")
    if unknown := sorted(payloads.keys() - set(topic)):
        raise typer.BadParameter(f"{', '.join(unknown)} is no --topic", param_hint="--json-schema")
    loaded = configuration(config, set_, bootstrap)
    options = java_options(loaded, kafka)

    with session(spark_settings("lake", master, conf, log_level), progress=say) as spark:
        from harvester_cli.pump import stop_on_signal

        from harvester.pipeline.lake.job import BatchDone, LakeSettings, run
        from harvester.pipeline.lake.payloads import from_ddl

        try:
            schemas = {name: from_ddl(ddl) for name, ddl in payloads.items()}
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--json-schema") from error
        settings = LakeSettings(
            topics=tuple(dict.fromkeys(topic)), root=absolute(to),
            kafka=options,
            checkpoint=None if checkpoint is None else absolute(checkpoint), header=loaded.record_header, once=once,
            trigger_s=trigger_s, most_records=max_records, compact_every=compact_every, payloads=schemas,
        )  # fmt: skip

        def tell(done: BatchDone) -> None:
            behind = "" if done.behind is None else f", {done.behind:,} behind"
            say(f"batch {done.batch}: {done.records:,} records, {done.per_s:,.0f}/s{behind}")

        with stop_on_signal() as stop:
            records = run(spark, settings, stop=stop.is_set, progress=tell)
    print(f"{records:,} records read into {settings.root}")
