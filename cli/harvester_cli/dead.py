"""`harvester dead`: list, show, redrive or discard the records in quarantine. Needs PostgreSQL only."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any
from uuid import UUID

import typer

from harvester_cli.options import ConfigOptions, JsonOption, grouped
from harvester_cli.output import connected, grid, is_ascii, print_json, print_rich, spinner

if TYPE_CHECKING:
    from datetime import datetime

    from rich.table import Table

    from harvester.config import Config
    from harvester.outbox.quarantine import Connection, DeadLetterFilter, DeadRecord
    from harvester.outbox.redrive import PlannedRedrive, Redriven
    from harvester.outbox.shape import OutboxShape

_LONGEST_CELL = 60

IncarnationOption = Annotated[
    UUID | None, typer.Option("--incarnation", help="Of this id space, where ids have started again.")
]


@dataclass
class DeadLetterOptions(ConfigOptions):
    """Which dead letters a command is about."""

    topic: Annotated[
        list[str] | None, typer.Option("--topic", help="Records of this topic; may be given several times.")
    ] = None
    key: Annotated[str | None, typer.Option("--key", help="Records of this key, as text.")] = None
    key_base64: Annotated[
        str | None, typer.Option("--key-base64", metavar="BASE64", help="Records of this key, where it is no text.")
    ] = None
    error: Annotated[str | None, typer.Option("--error", help="Records whose error contains this, in any case.")] = None
    error_regex: Annotated[
        str | None,
        typer.Option("--error-regex", metavar="REGEX", help="Records whose error matches this, in any case."),
    ] = None
    id_: Annotated[
        list[int] | None, typer.Option("--id", help="The record with this id; may be given several times.")
    ] = None
    incarnation: IncarnationOption = None
    since: Annotated[
        str | None,
        typer.Option(
            "--since", metavar="WHEN", help="Quarantined since then: 2h, 7d, 2026-01-31, 2026-01-31T12:00:00Z."
        ),
    ] = None

    def choice(self, limit: int | None) -> DeadLetterFilter:
        """The options as a filter; raises typer.BadParameter for what cannot be read."""
        from harvester.outbox.quarantine import DeadLetterFilter

        key = None if self.key is None else self.key.encode()
        if self.key_base64 is not None:
            if key is not None:
                raise typer.BadParameter("a key is given as text or as base64, not both", param_hint="--key-base64")
            key = _decoded(self.key_base64)
        return DeadLetterFilter(
            topics=self.topic or (),
            ids=self.id_ or (),
            incarnation=self.incarnation,
            key=key,
            error=self.error,
            error_pattern=self.error_regex,
            since=None if self.since is None else _moment(self.since),
            limit=limit,
        )


class Order(StrEnum):
    """The order of keys that a redrive insists on."""

    KEPT = "kept"
    UNKNOWN_OK = "unknown-ok"


@dataclass
class ChangeOptions(DeadLetterOptions):
    """Which dead letters are changed, and whether to ask first."""

    limit: Annotated[int | None, typer.Option("--limit", min=1, help="At most so many, the oldest.")] = None
    all_: Annotated[bool, typer.Option("--all", help="Every record, where nothing else says which.")] = False
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be done, and change nothing.")] = False
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False
    json_: JsonOption = False

    def checked_choice(self) -> DeadLetterFilter:
        """The filter; raises typer.BadParameter for options that do not go together."""
        from harvester.outbox.quarantine import DeadLetterFilter

        choice = self.choice(self.limit)
        is_everything = choice == DeadLetterFilter(limit=self.limit)
        if is_everything and not self.all_:
            raise typer.BadParameter(
                "say which records (--topic, --key, --error, --id, …), or --all", param_hint="--all"
            )
        if self.all_ and not is_everything:
            raise typer.BadParameter("every record, or those of a choice: not both", param_hint="--all")
        if self.json_ and not (self.yes or self.dry_run):
            raise typer.BadParameter("a script cannot be asked: add --yes", param_hint="--json")
        return choice


def _decoded(text: str) -> bytes:
    import binascii

    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise typer.BadParameter(f"is no base64: {error}", param_hint="--key-base64") from error


def _moment(text: str) -> datetime | timedelta:
    from harvester.config import parse_duration

    try:
        return parse_duration(text)
    except ValueError:
        pass
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise typer.BadParameter(
            "is neither a duration (2h, 7d) nor a time (ISO 8601)", param_hint="--since"
        ) from error
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


def as_json(record: DeadRecord, *, value: bool = False) -> dict[str, Any]:
    """The keys are a public interface. Bytes that are no UTF-8 stand in `…_base64`, and the text is null."""
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
    """A record under its old id, and the new one; `obstacle`: the reason for which its order was not certain."""
    reason = None if entry.obstacle is None else entry.obstacle.reason.value
    return {**as_json(entry.record), "new_id": entry.new_id, "obstacle": reason}


def table_of(records: Sequence[DeadRecord]) -> Table:
    """One line a record."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for name in ("id", "topic", "key", "quarantined at", "attempts", "error"):
        table.add_column(name, overflow="fold", justify="right" if name in ("id", "attempts") else "left")
    for record in records:
        # Text, not markup: keys and errors may contain brackets.
        cells = (
            str(record.id), one_line(record.topic), key_text(record.key),
            f"{record.quarantined_at:%Y-%m-%d %H:%M:%S}", str(record.attempts), one_line(record.error),
        )  # fmt: skip
        table.add_row(*(Text(cell) for cell in cells))
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
        rows.append(("", _text(record.value)))
    return grid(rows)


def line_of(record: DeadRecord) -> str:
    """A record in a sentence."""
    key = "no key" if record.key is None else f"key {key_text(record.key)}"
    return f"record {record.id} of {one_line(record.topic)}, {key}"


def key_text(key: bytes | None) -> str:
    """For people: text, or the bytes in hexadecimal, or nothing."""
    return "" if key is None else one_line(_text(key))


def one_line(text: str | None) -> str:
    """On one line, printable, shortened: errors and keys can hold anything."""
    flat = "".join(c if c.isprintable() else " " for c in " ".join((text or "").split()))
    dots = "..." if is_ascii() else "…"
    return flat if len(flat) <= _LONGEST_CELL else f"{flat[: _LONGEST_CELL - len(dots)]}{dots}"


def _text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return f"\\x{value.hex()}"


def bytes_json(name: str, value: bytes | None) -> dict[str, str | None]:
    """As text, or what is no UTF-8 in base64, under another name."""
    if value is None:
        return {name: None, f"{name}_base64": None}
    try:
        return {name: value.decode(), f"{name}_base64": None}
    except UnicodeDecodeError:
        return {name: None, f"{name}_base64": base64.b64encode(value).decode()}


def _time(moment: datetime | None) -> str | None:
    return moment.isoformat() if moment is not None else None


app = typer.Typer(no_args_is_help=True, help="Records that Kafka would not take: look, put back, discard.")


@app.command("list")
@grouped
def list_(
    options: DeadLetterOptions,
    limit: Annotated[int, typer.Option("--limit", min=1, help="At most so many, the newest.")] = 100,
    json_: JsonOption = False,
) -> None:
    """List records in quarantine, the newest first."""
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
            typer.echo(f"and more: --limit shows more than {limit}")


@app.command()
@grouped
def show(
    record_id: Annotated[int, typer.Argument(metavar="ID", help="The record's id.")],
    options: ConfigOptions,
    incarnation: IncarnationOption = None,
    json_: JsonOption = False,
) -> None:
    """Show everything about one record, its value included."""
    from harvester.errors import OutboxError
    from harvester.outbox.quarantine import DeadLetterFilter, list_dead

    settings = options.load()
    choice = DeadLetterFilter(ids=[record_id], incarnation=incarnation)
    with _quarantine(settings, read_only=True) as (connection, shape):
        found = list_dead(connection, settings.table, shape, choice, values=True)
    if not found:
        raise OutboxError(f"no record {record_id} is in quarantine", hint="`harvester dead list` shows those that are")
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
        bool, typer.Option("--out-of-order", help="Even if the order of a key is lost, or cannot be told.")
    ] = False,
    order: Annotated[
        Order,
        typer.Option(
            "--order",
            help="kept: only records that keep the order of their key; unknown-ok: also where that cannot be told,"
            " because there is no archive.",
        ),
    ] = Order.KEPT,
) -> None:
    """Put records back into the outbox, under new ids, in the order of their keys.

    All of them or, if one cannot keep the order of its key, none.
    """
    choice = options.checked_choice()

    from harvester.errors import OrderNotKept
    from harvester.outbox import redrive as redriving
    from harvester.outbox.key_order import Reason, summary

    settings = options.load()
    archive = settings.archive != "off"
    with _quarantine(settings) as (connection, shape):
        with spinner("looking whether the order of keys can be kept"):
            planned = redriving.plan(connection, settings.table, shape, choice, archive=archive)
        unknown_ok = order is Order.UNKNOWN_OK
        blocked = [entry for entry in planned if entry.obstacle is not None and not (unknown_ok and entry.is_unknown)]
        _require(planned, choice)
        if options.dry_run or (blocked and not out_of_order):
            _show_plan(settings, planned, dry_run=options.dry_run, json_=options.json_)
            if not options.dry_run:
                reasons = summary([entry.obstacle for entry in blocked if entry.obstacle is not None])
                raise OrderNotKept(len(blocked), len(planned), reasons)
            return
        if planned and not options.yes:
            typer.confirm(f"Put {_count(len(planned))} back into {settings.table}?", abort=True)
        identities = [entry.record.identity for entry in planned]
        with spinner(f"putting {_count(len(planned))} back"):
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
    doubts = f", {unknown:,} of them in an order that is unknown" if unknown else ""
    typer.echo(f"{_count(len(done))} put back{doubts}{_gone(len(planned) - len(done))}")


@app.command()
@grouped
def discard(
    options: ChangeOptions,
    reason: Annotated[str, typer.Option("--reason", help="Why; stands in the output.")],
) -> None:
    """Remove records from quarantine for good. The output, with the reason, is all that is left: keep it."""
    choice = options.checked_choice()
    if not reason.strip():
        raise typer.BadParameter("is empty", param_hint="--reason")

    from harvester.outbox import quarantine

    settings = options.load()
    with _quarantine(settings) as (connection, shape):
        records = quarantine.list_dead(connection, settings.table, shape, choice, oldest_first=True)
        _require(records, choice)
        asked = len(records)
        if records and not options.dry_run:
            if not options.yes:
                typer.confirm(f"Discard {_count(asked)} for good?", abort=True)
            records = quarantine.discard(connection, settings.table, shape, [record.identity for record in records])
    if options.json_:
        shown = [as_json(record) for record in records]
        _print_json(settings, dry_run=options.dry_run, reason=reason, discarded=shown)
        return
    verb = "would be discarded" if options.dry_run else "discarded"
    for record in records:
        typer.echo(f"{line_of(record)}: {verb}, because {one_line(reason)}; {one_line(record.error)}")
    typer.echo(f"{_count(len(records))} {verb}{_gone(asked - len(records))}")


@contextmanager
def _quarantine(settings: Config, *, read_only: bool = False) -> Iterator[tuple[Connection, OutboxShape]]:
    from harvester.outbox.schema import inspect

    with connected(settings, "dead") as connection:
        yield connection, inspect(connection, settings.table, read_only=read_only)


def _require(found: list[DeadRecord] | list[PlannedRedrive], choice: DeadLetterFilter) -> None:
    """A record that was named has to be there; a search may find nothing."""
    from harvester.errors import OutboxError

    if not found and choice.ids:
        raise OutboxError("no such record is in quarantine", hint="`harvester dead list` shows those that are")


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
    typer.echo(f"{_count(len(planned))}, {len(blocked)} of them out of order; nothing was changed")


def _print_json(settings: Config, **fields: Any) -> None:
    print_json({"outbox": str(settings.table), **fields})


def _count(records: int) -> str:
    return f"{records:,} {'record' if records == 1 else 'records'}"


def _gone(records: int) -> str:
    return f"; {_count(records)} had gone meanwhile" if records else ""
