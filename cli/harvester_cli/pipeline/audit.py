"""`harvester pipeline audit`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from harvester_cli.options import JsonOption, duration, grouped
from harvester_cli.pipeline import options
from harvester_cli.pipeline.options import Job, say

from harvester.errors import VerificationFailed

if TYPE_CHECKING:
    from harvester.pipeline.audit.proof import Proof
    from harvester.pipeline.audit.report import AuditReport


@grouped
def audit(
    topic: Annotated[
        list[str] | None, typer.Option(help="Every topic to which the outbox writes; may be given several times.")
    ] = None,
    lake: Annotated[str | None, options.tables("The tables of `pipeline lake`, instead of topics.")] = None,
    incremental: Annotated[
        bool,
        typer.Option(
            "--incremental",
            help="Compare a lake's ids from the last proof to the newest cut with the archive, by sums.",
        ),
    ] = False,
    since: options.SinceOption = None,
    until: options.UntilOption = None,
    margin: Annotated[
        str,
        typer.Option(metavar="DURATION", help="How far before --from reading begins, to include what was under way."),
    ] = "1h",
    history: Annotated[
        bool, typer.Option("--history/--no-history", help="Compare with outbox, quarantine and archive.")
    ] = True,
    serial_keys: Annotated[
        bool,
        typer.Option(
            "--serial-keys/--no-serial-keys",
            help="Writers of a key wait for each other: ids of a key that are out of order break the guarantee.",
        ),
    ] = True,
    strict: Annotated[
        bool, typer.Option("--strict", help="Allow no repeats [default: if delivery is exactly-once].")
    ] = False,
    checkpoint: Annotated[
        str | None, options.directory("Checkpoint of the lake [default: next to the tables].")
    ] = None,
    to: Annotated[str | None, options.tables("Add the findings to tables at this location.")] = None,
    format_: options.FormatOption = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page with plots.")] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json-file", metavar="FILE", help="Write the JSON to this file.")
    ] = None,
    json_: JsonOption = False,
    *,
    job: Job,
) -> None:
    """Prove delivery: compare what the database knows with what the topics contain.

    Looks for lost, repeated and reordered records and for gaps in lanes; measures latency, keys, shards and terms.
    Exits with 0 only if no guarantee was broken.
    """
    from importlib.util import find_spec

    if bool(topic) == bool(lake):
        raise typer.BadParameter("either topics or a lake", param_hint="--topic, --lake")
    if incremental and (lake is None or since is not None or until is not None or not history):
        raise typer.BadParameter(
            "needs a --lake and its history, and no range of times: it has one of ids", param_hint="--incremental"
        )
    if html is not None and not (find_spec("jinja2") and find_spec("pygal")):
        raise typer.BadParameter("needs Jinja2 and Pygal: pip install 'outbox-harvester[spark]'", param_hint="--html")
    begin, end = options.period(since, until)
    reach = duration(margin, "--margin")
    options.check_writable(html, "--html")
    options.check_writable(json_file, "--json-file")

    with job.spark("audit", format_=format_) as spark:
        from harvester.pipeline.audit.job import AuditSettings, run, stages_told

        settings = AuditSettings(
            topics=tuple(dict.fromkeys(topic or ())), lake=lake, kafka=job.kafka,
            header=job.config.record_header, dsn=job.config.data_source if history else None, table=job.config.table,
            since=begin, until=end, margin=reach, serial_keys=serial_keys,
            once=strict or job.config.delivery == "exactly-once", notice_topic=job.config.poison.notice_topic,
            record_timestamps=job.config.record_timestamp == "create_time", to=to, checkpoint=checkpoint,
        )  # fmt: skip
        proofs: tuple[Proof, ...] | None = None
        with stages_told(spark, say):
            if incremental:
                from harvester.pipeline.audit.proof import run as prove

                report, proofs = prove(spark, settings, progress=say)
            else:
                report = run(spark, settings, progress=say)
    text = report.to_json()
    unwritten = _write(report, text, html, json_file)
    print(text if json_ else "\n".join(_summary(report) if proofs is None else _proved(report, proofs)))
    if not report.holds:
        raise VerificationFailed(report.answer(), hint="the examples name the records and their positions in Kafka")
    if unwritten is not None:
        from harvester.pipeline.audit.job import AuditUnfinished

        raise AuditUnfinished(
            f"the report cannot be written: {unwritten}", hint="with --json, it is on standard output"
        )


def _write(report: AuditReport, text: str, html: Path | None, json_file: Path | None) -> OSError | None:
    """Write the files that were asked for, and return the last error.

    One that fails keeps no other from being written: a repeat of a proof would have nothing to report.
    """
    contents = [(json_file, text + "\n")]
    if html is not None:
        from harvester.pipeline.audit.page import page

        contents.append((html, page(report)))
    failed = None
    for file, content in contents:
        try:
            if file is not None:
                file.write_text(content, encoding="utf-8")
        except OSError as error:
            say(f"the report cannot be written: {error}")
            failed = error
    return failed


def _summary(report: AuditReport) -> list[str]:
    from harvester.pipeline.audit.report import advice

    figures = report.figures
    lines = [
        f"{figures['ids']:,} ids in {figures['deliveries']:,} deliveries; {figures['archived']:,} archived,"
        f" {figures['quarantined']:,} in quarantine, {figures['pending']:,} waiting",
    ]
    lines += _findings(report)
    for total in report.latency:
        if total.hour is None and total.topic is not None and total.p50_ms is not None:
            lines.append(f"latency of {total.topic}: p50 {total.p50_ms:,.1f} ms, p99 {total.p99_ms:,.1f} ms")
    if report.skew is not None:
        lines.append(advice(report.skew, report.hot_keys))
    return [*lines, report.answer()]


def _findings(report: AuditReport) -> list[str]:
    lines = []
    for one in report.found:
        lines.append(f"{one.severity}: {one.count:,} {one.kind}")
        lines += [f"  {example}" for example in one.examples]
    return [*lines, *(f"not judged: {line}" for line in report.not_judged)]


def _proved(report: AuditReport, proofs: tuple[Proof, ...]) -> list[str]:
    if not proofs:
        return ["Nothing new: the archive has no ids from the last proof to the newest cut."]
    lines = [
        f"ids from {one.from_id} to before {one.to_id} of {one.incarnation}: {one.records:,} records in"
        f" {one.buckets:,} buckets, of which {one.unequal:,} differ: {one.verdict}"
        for one in proofs
    ]
    return [*lines, *_findings(report), report.answer()]
