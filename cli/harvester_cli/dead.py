"""`harvester dead`: list, show, redrive or discard the records in quarantine. Needs only PostgreSQL.

With `--dead-letter-topic` it applies to records that consumers have given up: `dead_topic`.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal
from uuid import UUID

import typer

from harvester.errors import OrderNotKept, OutboxError
from harvester_cli.dashboard.figures import counted
from harvester_cli.options import BootstrapOption, ConfigOptions, JsonOption, from_base64, grouped, is_utf8, moment
from harvester_cli.output import connected, grid, is_ascii, print_json, print_rich, spinner

if TYPE_CHECKING:
    from rich.table import Table

    from harvester.config import Config
    from harvester.outbox.quarantine import Connection, DeadLetterFilter, DeadRecord
    from harvester.outbox.redrive import PlannedRedrive, Redriven
    from harvester.outbox.shape import OutboxShape

_LONGEST_CELL = 60

IncarnationOption = Annotated[
    UUID | None, typer.Option("--incarnation", help="Records of this incarnation, if ids have started again.")
]


@dataclass
class DeadLetterTopicOptions(ConfigOptions):
    """Selects the place of the dead letters: the quarantine, or the topic of a group of consumers."""

    dead_letter_topic: Annotated[
        str | None, typer.Option("--dead-letter-topic", help="Records that consumers have written to this topic.")
    ] = None
    bootstrap: BootstrapOption = None


@dataclass
class DeadLetterOptions(DeadLetterTopicOptions):
    """Selects the dead letters for a command."""

    topic: Annotated[
        list[str] | None, typer.Option("--topic", help="Records of this topic; may be given several times.")
    ] = None
    key: Annotated[str | None, typer.Option("--key", help="Records of this key, as text.")] = None
    key_base64: Annotated[
        str | None, typer.Option("--key-base64", metavar="BASE64", help="Records of this key, if it is not text.")
    ] = None
    error: Annotated[str | None, typer.Option("--error", help="Records whose error contains this, ignoring case.")] = (
        None
    )
    error_regex: Annotated[
        str | None,
        typer.Option("--error-regex", metavar="REGEX", help="Records whose error matches this, ignoring case."),
    ] = None
    id_: Annotated[
        list[str] | None, typer.Option("--id", help="The record with this id; may be given several times.")
    ] = None
    incarnation: IncarnationOption = None
    since: Annotated[
        str | None,
        typer.Option(
            "--since", metavar="WHEN", help="Quarantined since then: 2h, 7d, 2026-01-31, 2026-01-31T12:00:00Z."
        ),
    ] = None

    def choice(self, limit: int | None, *, topic: bool = False) -> DeadLetterFilter:
        """The options as a filter; raises typer.BadParameter for invalid values.

        `topic`: for a dead-letter topic, where an id is not a number and not part of the filter.
        """
        from harvester.outbox.quarantine import DeadLetterFilter

        for option, texts in (
            ("--topic", self.topic or ()), ("--key", [self.key]), ("--error", [self.error]),
            ("--error-regex", [self.error_regex]),
        ):  # fmt: skip
            if not all(is_utf8(text or "") for text in texts):
                instead = "; use --key-base64" if option == "--key" else ""
                raise typer.BadParameter(f"is not valid UTF-8{instead}", param_hint=option)
        key = None if self.key is None else self.key.encode()
        if self.key_base64 is not None:
            if key is not None:
                raise typer.BadParameter("a key is given as text or as base64, not both", param_hint="--key-base64")
            key = from_base64(self.key_base64, "--key-base64")
        return DeadLetterFilter(
            topics=self.topic or (),
            ids=() if topic else tuple(number(each) for each in self.id_ or ()),
            incarnation=self.incarnation,
            key=key,
            error=self.error,
            error_pattern=self.error_regex,
            since=None if self.since is None else moment(self.since, "--since"),
            limit=limit,
        )


@dataclass
class ChangeOptions(DeadLetterOptions):
    """Selects the dead letters to change, and whether to ask first."""

    limit: Annotated[int | None, typer.Option("--limit", min=1, help="At most this many, the oldest.")] = None
    all_: Annotated[bool, typer.Option("--all", help="Every record; required if no other option selects records.")] = (
        False
    )
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be done and change nothing.")] = False
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False
    json_: JsonOption = False

    def checked_choice(self, *, topic: bool = False) -> DeadLetterFilter:
        """The filter; raises typer.BadParameter for options that cannot be combined."""
        from harvester.outbox.quarantine import DeadLetterFilter

        choice = self.choice(self.limit, topic=topic)
        is_everything = choice == DeadLetterFilter(limit=self.limit) and not self.id_
        if is_everything and not self.all_:
            raise typer.BadParameter(
                "select records (--topic, --key, --error, --id, …), or use --all", param_hint="--all"
            )
        if self.all_ and not is_everything:
            raise typer.BadParameter("cannot be combined with options that select records", param_hint="--all")
        if self.json_ and not (self.yes or self.dry_run):
            raise typer.BadParameter("--json cannot ask for confirmation: add --yes", param_hint="--json")
        return choice


def number(text: str) -> int:
    """The id of a record in quarantine, a bigint; raises typer.BadParameter."""
    try:
        found = int(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not a number", param_hint="--id") from error
    if not -(1 << 63) <= found < 1 << 63:
        raise typer.BadParameter(f"{text!r} is out of range", param_hint="--id")
    return found


def as_json(record: DeadRecord, *, value: bool = False) -> dict[str, Any]:
    """The keys are a public interface. Bytes that are not UTF-8 are in `…_base64`, and the text is null."""
    shown: dict[str, Any] = {
        "id": record.id,
        "incarnation": str(record.incarnation),
        "topic": record.topic,
        **bytes_json("key", record.key),
        "partition": record.partition,
        "error": record.error,
        "attempts": record.attempts,
        "create_time": _time(record.create_time),
        "first_failed_at": _time(record.first_failed_at),
        "quarantined_at": _time(record.quarantined_at),
        "value_bytes": record.value_bytes,
    }
    if value:
        shown |= bytes_json("value", record.value)
        shown |= {"header_keys": record.header_keys, "header_values": record.header_values}
    return shown


def planned_json(entry: PlannedRedrive) -> dict[str, Any]:
    """A record and its obstacle: `reason` is one of waiting, earlier, published, unknown."""
    found = entry.obstacle
    return {
        **as_json(entry.record),
        "obstacle": None
        if found is None
        else {"reason": found.reason.value, "other_id": found.other_id, "text": str(found)},
    }


def redriven_json(entry: Redriven) -> dict[str, Any]:
    """A record under its old id, and the new one; `obstacle`: the reason why its order was not certain."""
    reason = None if entry.obstacle is None else entry.obstacle.reason.value
    return {**as_json(entry.record), "new_id": entry.new_id, "obstacle": reason}


def table_of(records: Sequence[DeadRecord]) -> Table:
    """One line per record."""
    rows = (
        (
            str(record.id), one_line(record.topic), key_text(record.key),
            f"{record.quarantined_at:%Y-%m-%d %H:%M:%S}", str(record.attempts), one_line(record.error),
        )
        for record in records
    )  # fmt: skip
    return lines_table(("id", "topic", "key", "quarantined at", "attempts", "error"), rows, numbers=("id", "attempts"))


def lines_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Sequence[str]) -> Table:
    """A row for each record; the columns in `numbers` contain numbers."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for name in columns:
        table.add_column(name, overflow="fold", justify="right" if name in numbers else "left")
    for row in rows:
        table.add_row(*map(Text, row))  # not markup: keys and errors may contain brackets
    return table


def page_of(record: DeadRecord) -> Table:
    """Everything about one record; name and value."""
    headers = "none"
    if record.header_keys or record.header_values:
        headers = f"keys {record.header_keys}, values {record.header_values}"
    rows = [
        ("id", f"{record.id}, incarnation {record.incarnation}"),
        ("topic", record.topic or ""),
        ("partition", "any" if record.partition is None else str(record.partition)),
        ("key", key_text(record.key)),
        ("error", record.error),
        ("attempts", str(record.attempts)),
        ("created", _time(record.create_time) or "unknown"),
        ("first failed", _time(record.first_failed_at) or "unknown"),
        ("quarantined", _time(record.quarantined_at) or "unknown"),
        ("headers", headers),
        ("value", f"{record.value_bytes:,} bytes" if record.value_bytes is not None else "none (a tombstone)"),
    ]
    if record.value is not None:
        rows.append(("", text_of(record.value)))
    return grid(rows)


def line_of(record: DeadRecord) -> str:
    """A record as a sentence."""
    key = "no key" if record.key is None else f"key {key_text(record.key)}"
    return f"record {record.id} of {one_line(record.topic)}, {key}"


def key_text(key: bytes | None) -> str:
    """For people: text, or the bytes in hexadecimal, or nothing."""
    return "" if key is None else one_line(text_of(key))


def one_line(text: str | None) -> str:
    """On one line, printable, shortened: errors and keys can contain anything."""
    flat = "".join(c if c.isprintable() else " " for c in " ".join((text or "").split()))
    dots = "..." if is_ascii() else "…"
    return flat if len(flat) <= _LONGEST_CELL else f"{flat[: _LONGEST_CELL - len(dots)]}{dots}"


def text_of(value: bytes) -> str:
    """For people: text, or the bytes in hexadecimal."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return f"\\x{value.hex()}"


def bytes_json(name: str, value: bytes | None) -> dict[str, str | None]:
    """As text, or base64 under another name if it is not UTF-8."""
    if value is None:
        return {name: None, f"{name}_base64": None}
    try:
        return {name: value.decode(), f"{name}_base64": None}
    except UnicodeDecodeError:
        return {name: None, f"{name}_base64": base64.b64encode(value).decode()}


def _time(moment: datetime | None) -> str | None:
    return moment.isoformat() if moment is not None else None


app = typer.Typer(
    no_args_is_help=True, help="Records that Kafka or a consumer did not accept: show, put back, discard."
)


@app.command("list")
@grouped
def list_(
    options: DeadLetterOptions,
    limit: Annotated[int, typer.Option("--limit", min=1, help="At most this many, the newest.")] = 100,
    json_: JsonOption = False,
) -> None:
    """List records in quarantine, newest first."""
    if options.dead_letter_topic is not None:
        from harvester_cli.dead_topic import list_letters

        list_letters(options, limit, json_=json_)
        return
    choice = options.choice(limit + 1)

    from harvester.outbox.quarantine import list_dead

    settings = options.load()
    with _quarantine(settings, read_only=True) as (connection, shape):
        found = list_dead(connection, settings.table, shape, choice)
    records, more = found[:limit], len(found) > limit
    if json_:
        _print_json(settings, records=[as_json(record) for record in records], more=more)
    elif not records:
        typer.echo("no record matches")
    else:
        print_rich(table_of(records))
        if more:
            typer.echo(f"and more: use --limit to show more than {limit}")


@app.command()
@grouped
def show(
    record_id: Annotated[str, typer.Argument(metavar="ID", help="The record's id, as `list` shows it.")],
    options: DeadLetterTopicOptions,
    incarnation: IncarnationOption = None,
    json_: JsonOption = False,
) -> None:
    """Show everything about one record, including its value."""
    if options.dead_letter_topic is not None:
        from harvester_cli.dead_topic import show_letter

        show_letter(options, record_id, json_=json_)
        return

    from harvester.outbox.quarantine import DeadLetterFilter, list_dead

    settings = options.load()
    choice = DeadLetterFilter(ids=[number(record_id)], incarnation=incarnation)
    with _quarantine(settings, read_only=True) as (connection, shape):
        found = list_dead(connection, settings.table, shape, choice, values=True)
    if not found:
        raise OutboxError(
            f"no record {record_id} is in quarantine", hint="`harvester dead list` shows those in quarantine"
        )
    if len(found) > 1:
        spaces = ", ".join(str(record.incarnation) for record in found)
        raise OutboxError(f"{len(found)} records have the id {record_id}", hint=f"add --incarnation, one of {spaces}")
    if json_:
        _print_json(settings, record=as_json(found[0], value=True))
    else:
        print_rich(page_of(found[0]))


@app.command()
@grouped
def redrive(
    options: ChangeOptions,
    out_of_order: Annotated[
        bool, typer.Option("--out-of-order", help="Even if the order of a key is lost or unknown.")
    ] = False,
    order: Annotated[
        Literal["kept", "unknown-ok"],
        typer.Option(
            "--order",
            help="kept: only records that keep the order of their key; unknown-ok: also those for which that is unknown"
            " for lack of an archive.",
        ),
    ] = "kept",
) -> None:
    """Put records back into the outbox, under new ids, in the order of their keys.

    Either all of them or, if one cannot keep the order of its key, none. Records of a dead-letter topic go back to the
    ends of their original partitions.
    """
    if options.dead_letter_topic is not None:
        from harvester_cli.dead_topic import redrive_letters

        redrive_letters(options)
        return
    choice = options.checked_choice()

    from harvester.outbox import redrive as redriving
    from harvester.outbox.archive import SILENCE_S
    from harvester.outbox.key_order import Reason, summary

    settings = options.load()
    archive = settings.archive != "off"
    with _quarantine(settings, silence_s=SILENCE_S) as (connection, shape):
        with spinner("checking whether the order of keys can be kept"):
            planned = redriving.plan(connection, settings.table, shape, choice, archive=archive)
        unknown_ok = order == "unknown-ok"
        blocked = [entry for entry in planned if entry.obstacle is not None and not (unknown_ok and entry.is_unknown)]
        _require(planned, choice)
        if options.dry_run or (blocked and not out_of_order):
            _show_plan(settings, planned, dry_run=options.dry_run, json_=options.json_)
            if not options.dry_run:
                reasons = summary([entry.obstacle for entry in blocked if entry.obstacle is not None])
                raise OrderNotKept(len(blocked), len(planned), reasons)
            return
        if planned and not options.yes:
            typer.confirm(f"Put {counted(len(planned), 'record')} back into {settings.table}?", abort=True)
        identities = [entry.record.identity for entry in planned]
        with spinner(f"putting {counted(len(planned), 'record')} back"):
            done = redriving.redrive(
                connection, settings.table, shape, identities,
                archive=archive, out_of_order=out_of_order, unknown_ok=unknown_ok,
            )  # fmt: skip
    if options.json_:
        _print_json(settings, dry_run=False, redriven=[redriven_json(entry) for entry in done], blocked=[])
        return
    for entry in done:
        doubt = f" although {entry.obstacle}" if entry.obstacle is not None else ""
        typer.echo(f"{line_of(entry.record)}: back in the outbox with id {entry.new_id}{doubt}")
    unknown = sum(entry.obstacle is not None and entry.obstacle.reason is Reason.UNKNOWN for entry in done)
    doubts = f", {unknown:,} of them in an unknown order" if unknown else ""
    typer.echo(f"{counted(len(done), 'record')} put back{doubts}{_gone(len(planned) - len(done))}")


@app.command()
@grouped
def discard(
    options: ChangeOptions,
    reason: Annotated[str, typer.Option("--reason", help="Why; included in the output.")],
) -> None:
    """Permanently remove records from quarantine. Only the output, with the reason, remains: keep it.

    With --json it also has values and headers, from which a record can be restored.
    """
    if not reason.strip():
        raise typer.BadParameter("is empty", param_hint="--reason")
    if options.dead_letter_topic is not None:
        from harvester_cli.dead_topic import discard_letters

        discard_letters(options, reason)
        return
    choice = options.checked_choice()

    from harvester.outbox import quarantine

    settings = options.load()
    with _quarantine(settings) as (connection, shape):
        found = quarantine.list_dead(
            connection, settings.table, shape, choice, values=options.json_ and options.dry_run, oldest_first=True
        )
        _require(found, choice)

        def report(records: list[DeadRecord]) -> None:
            if options.json_:
                shown = [as_json(record, value=True) for record in records]
                _print_json(settings, dry_run=options.dry_run, reason=reason, discarded=shown)
            else:
                verb = "would be discarded" if options.dry_run else "discarded"
                for record in records:
                    typer.echo(f"{line_of(record)}: {verb}, because {one_line(reason)}; {one_line(record.error)}")
                typer.echo(f"{counted(len(records), 'record')} {verb}{_gone(len(found) - len(records))}")

        if options.dry_run or not found:
            report(found)
            return
        if not options.yes:
            typer.confirm(f"Discard {counted(len(found), 'record')} permanently?", abort=True)
        identities = [record.identity for record in found]
        # What cannot be printed is not discarded.
        quarantine.discard(connection, settings.table, shape, identities, report, values=options.json_)


@contextmanager
def _quarantine(
    settings: Config, *, read_only: bool = False, silence_s: float | None = None
) -> Iterator[tuple[Connection, OutboxShape]]:
    from harvester.outbox.schema import inspect

    with connected(settings, "dead", silence_s) as connection:
        yield connection, inspect(connection, settings.table, read_only=read_only)


def _require(found: list[DeadRecord] | list[PlannedRedrive], choice: DeadLetterFilter) -> None:
    """A named record must exist; a search may find nothing."""
    if not found and choice.ids:
        raise OutboxError("no such record is in quarantine", hint="`harvester dead list` shows those in quarantine")


def _show_plan(settings: Config, planned: list[PlannedRedrive], *, dry_run: bool, json_: bool) -> None:
    blocked = [entry for entry in planned if entry.obstacle is not None]
    if json_:
        shown = {"redriven": [], "blocked": [planned_json(entry) for entry in blocked]}
        if dry_run:
            shown["planned"] = [planned_json(entry) for entry in planned]
        _print_json(settings, dry_run=dry_run, **shown)
        return
    for entry in planned:
        typer.echo(f"{line_of(entry.record)}: {entry.obstacle or 'can go back in order'}")
    typer.echo(f"{counted(len(planned), 'record')}, {len(blocked)} of them out of order; nothing was changed")


def _print_json(settings: Config, **fields: Any) -> None:
    print_json({"outbox": str(settings.table), **fields})


def _gone(records: int) -> str:
    return f"; {counted(records, 'record')} had gone in the meantime" if records else ""
