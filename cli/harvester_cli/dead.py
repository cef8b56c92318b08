"""`harvester dead`: the records in quarantine: list, show, redrive, discard. Needs PostgreSQL only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harvester_cli import dead_view as view
from harvester_cli.dead_options import (
    ErrorOption,
    ErrorRegexOption,
    IdOption,
    IncarnationOption,
    KeyBase64Option,
    KeyOption,
    SinceOption,
    TopicOption,
    chosen,
    is_everything,
)
from harvester_cli.options import ConfigOption, JsonOption, SetOption, load

if TYPE_CHECKING:
    from harvester.config import Config
    from harvester.outbox.dead import Chosen, Connection, DeadRecord
    from harvester.outbox.redrive import Planned
    from harvester.outbox.shape import OutboxShape

app = typer.Typer(no_args_is_help=True, help="Records that Kafka would not take: look, put back, discard.")

LimitOption = Annotated[int | None, typer.Option("--limit", min=1, help="At most so many, the oldest.")]
AllOption = Annotated[bool, typer.Option("--all", help="Every record, where nothing else says which.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Show what would be done, and change nothing.")]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


@app.command("list")
def list_(
    config: ConfigOption = None,
    set_: SetOption = None,
    topic: TopicOption = None,
    key: KeyOption = None,
    key_base64: KeyBase64Option = None,
    error: ErrorOption = None,
    error_regex: ErrorRegexOption = None,
    id_: IdOption = None,
    incarnation: IncarnationOption = None,
    since: SinceOption = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="At most so many, the newest.")] = 100,
    json_: JsonOption = False,
) -> None:
    """List records in quarantine, the newest first."""
    choice = chosen(
        topic=topic, key=key, key_base64=key_base64, error=error, error_regex=error_regex, id_=id_,
        incarnation=incarnation, since=since, limit=limit + 1,
    )  # fmt: skip

    from harvester.outbox.dead import list_dead

    settings = load(config, set_)
    with _quarantine(settings) as (connection, shape):
        found = list_dead(connection, settings.table, shape, choice)
    records, more = found[:limit], len(found) > limit
    if json_:
        _print_json(settings, records=[view.as_json(record) for record in records], more=more)
    elif not records:
        typer.echo("no record matches")
    else:
        _print(view.table_of(records))
        if more:
            typer.echo(f"and more: --limit shows more than {limit}")


@app.command()
def show(
    record_id: Annotated[int, typer.Argument(metavar="ID", help="The record's id.")],
    config: ConfigOption = None,
    set_: SetOption = None,
    incarnation: IncarnationOption = None,
    json_: JsonOption = False,
) -> None:
    """Show everything about one record, its value included."""
    from harvester.errors import OutboxError
    from harvester.outbox.dead import Chosen, list_dead

    settings = load(config, set_)
    choice = Chosen(ids=[record_id], incarnation=incarnation)
    with _quarantine(settings) as (connection, shape):
        found = list_dead(connection, settings.table, shape, choice, values=True)
    if not found:
        raise OutboxError(f"no record {record_id} is in quarantine", hint="`harvester dead list` shows those that are")
    if len(found) > 1:
        spaces = ", ".join(str(record.incarnation) for record in found)
        raise OutboxError(f"{len(found)} records have the id {record_id}", hint=f"add --incarnation, one of {spaces}")
    if json_:
        _print_json(settings, record=view.as_json(found[0], value=True))
    else:
        _print(view.page_of(found[0]))


@app.command()
def redrive(
    config: ConfigOption = None,
    set_: SetOption = None,
    topic: TopicOption = None,
    key: KeyOption = None,
    key_base64: KeyBase64Option = None,
    error: ErrorOption = None,
    error_regex: ErrorRegexOption = None,
    id_: IdOption = None,
    incarnation: IncarnationOption = None,
    since: SinceOption = None,
    limit: LimitOption = None,
    all_: AllOption = False,
    out_of_order: Annotated[
        bool, typer.Option("--out-of-order", help="Even if the order of a key is lost, or cannot be told.")
    ] = False,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    json_: JsonOption = False,
) -> None:
    """Put records back into the outbox, under new ids, in the order of their keys.

    All of them or, if one cannot keep the order of its key, none.
    """
    choice = chosen(
        topic=topic, key=key, key_base64=key_base64, error=error, error_regex=error_regex, id_=id_,
        incarnation=incarnation, since=since, limit=limit,
    )  # fmt: skip
    _check_choice(choice, all_=all_, dry_run=dry_run, yes=yes, json_=json_)

    from harvester.errors import OrderNotKept
    from harvester.outbox import redrive as redriving
    from harvester.outbox.keyorder import summary

    settings = load(config, set_)
    archive = settings.archive != "off"
    with _quarantine(settings) as (connection, shape):
        with _busy("looking whether the order of keys can be kept"):
            planned = redriving.plan(connection, settings.table, shape, choice, archive=archive)
        blocked = [entry for entry in planned if entry.obstacle is not None]
        _require(planned, choice)
        if dry_run or (blocked and not out_of_order):
            _show_plan(settings, planned, dry_run=dry_run, json_=json_)
            if not dry_run:
                reasons = summary([entry.obstacle for entry in blocked if entry.obstacle is not None])
                raise OrderNotKept(len(blocked), len(planned), reasons)
            return
        if planned and not yes:
            typer.confirm(f"Put {_count(len(planned))} back into {settings.table}?", abort=True)
        identities = [entry.record.identity for entry in planned]
        with _busy(f"putting {_count(len(planned))} back"):
            done = redriving.redrive(
                connection, settings.table, shape, identities, archive=archive, out_of_order=out_of_order
            )
    if json_:
        _print_json(settings, dry_run=False, redriven=[view.redriven_json(entry) for entry in done], blocked=[])
        return
    for entry in done:
        typer.echo(f"{view.line_of(entry.record)}: back in the outbox with id {entry.new_id}")
    typer.echo(f"{_count(len(done))} put back{_gone(len(planned) - len(done))}")


@app.command()
def discard(
    reason: Annotated[str, typer.Option("--reason", help="Why; stands in the output.")],
    config: ConfigOption = None,
    set_: SetOption = None,
    topic: TopicOption = None,
    key: KeyOption = None,
    key_base64: KeyBase64Option = None,
    error: ErrorOption = None,
    error_regex: ErrorRegexOption = None,
    id_: IdOption = None,
    incarnation: IncarnationOption = None,
    since: SinceOption = None,
    limit: LimitOption = None,
    all_: AllOption = False,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    json_: JsonOption = False,
) -> None:
    """Remove records from quarantine for good. The output, with the reason, is all that is left: keep it."""
    choice = chosen(
        topic=topic, key=key, key_base64=key_base64, error=error, error_regex=error_regex, id_=id_,
        incarnation=incarnation, since=since, limit=limit,
    )  # fmt: skip
    _check_choice(choice, all_=all_, dry_run=dry_run, yes=yes, json_=json_)
    if not reason.strip():
        raise typer.BadParameter("is empty", param_hint="--reason")

    from harvester.outbox import dead

    settings = load(config, set_)
    with _quarantine(settings) as (connection, shape):
        records = dead.list_dead(connection, settings.table, shape, choice, oldest_first=True)
        _require(records, choice)
        asked = len(records)
        if records and not dry_run:
            if not yes:
                typer.confirm(f"Discard {_count(asked)} for good?", abort=True)
            records = dead.discard(connection, settings.table, shape, [record.identity for record in records])
    if json_:
        shown = [view.as_json(record) for record in records]
        _print_json(settings, dry_run=dry_run, reason=reason, discarded=shown)
        return
    verb = "would be discarded" if dry_run else "discarded"
    for record in records:
        typer.echo(f"{view.line_of(record)}: {verb}, because {view.one_line(reason)}; {view.one_line(record.error)}")
    typer.echo(f"{_count(len(records))} {verb}{_gone(asked - len(records))}")


@contextmanager
def _quarantine(settings: Config) -> Iterator[tuple[Connection, OutboxShape]]:
    from contextlib import closing

    from harvester.outbox.connect import connect
    from harvester.outbox.schema import inspect

    with closing(connect(settings.dsn, application_name="harvester dead")) as connection:
        yield connection, inspect(connection, settings.table)


def _busy(what: str) -> AbstractContextManager[Any]:
    """Something that moves, for people only: rich shows nothing where stderr is no terminal."""
    from rich.console import Console

    return Console(stderr=True).status(f"{what} …")


def _check_choice(choice: Chosen, *, all_: bool, dry_run: bool, yes: bool, json_: bool) -> None:
    if is_everything(choice) and not all_:
        raise typer.BadParameter("say which records (--topic, --key, --error, --id, …), or --all", param_hint="--all")
    if not is_everything(choice) and all_:
        raise typer.BadParameter("every record, or those of a choice: not both", param_hint="--all")
    if json_ and not (yes or dry_run):
        raise typer.BadParameter("a script cannot be asked: add --yes", param_hint="--json")


def _require(found: list[DeadRecord] | list[Planned], choice: Chosen) -> None:
    """A record that was named has to be there; a search may find nothing."""
    from harvester.errors import OutboxError

    if not found and choice.ids:
        raise OutboxError("no such record is in quarantine", hint="`harvester dead list` shows those that are")


def _show_plan(settings: Config, planned: list[Planned], *, dry_run: bool, json_: bool) -> None:
    blocked = [entry for entry in planned if entry.obstacle is not None]
    if json_:
        shown = {"redriven": [], "blocked": [view.planned_json(entry) for entry in blocked]}
        if dry_run:
            shown["planned"] = [view.planned_json(entry) for entry in planned]
        _print_json(settings, dry_run=dry_run, **shown)
        return
    for entry in planned:
        typer.echo(f"{view.line_of(entry.record)}: {entry.obstacle or 'can go back in order'}")
    typer.echo(f"{_count(len(planned))}, {len(blocked)} of them out of order; nothing was changed")


def _print_json(settings: Config, **fields: Any) -> None:
    import json

    typer.echo(json.dumps({"outbox": str(settings.table), **fields}))


def _print(renderable: Any) -> None:
    from rich.console import Console

    Console().print(renderable)


def _count(records: int) -> str:
    return f"{records:,} {'record' if records == 1 else 'records'}"


def _gone(records: int) -> str:
    return f"; {_count(records)} had gone meanwhile" if records else ""
