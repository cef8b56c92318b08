"""The commands that set an outbox up and hand it over: `harvester init`, `adopt`, `grants`, `move`."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from harvester.errors import DatabaseUnavailable, LeadershipError
from harvester_cli.options import ConfigOptions, JsonOption, LoggedOptions, grouped
from harvester_cli.output import connected, print_json, spinner

if TYPE_CHECKING:
    from harvester.config import Config
    from harvester.outbox.catalog import Facts
    from harvester.outbox.sql.ddl import KafkaType


@grouped
def init(
    options: LoggedOptions,
    print_: Annotated[bool, typer.Option("--print", help="Print the SQL for psql instead and change nothing.")] = False,
    notify: Annotated[
        bool | None,
        typer.Option(
            "--notify/--no-notify",
            help="Create or remove the trigger that wakes the leader at each commit. (default: leave as it is)",
        ),
    ] = None,
    functions: Annotated[
        bool | None,
        typer.Option(
            "--functions/--no-functions", help="Create or remove the SQL functions for writers. (default: leave as is)"
        ),
    ] = None,
    value_type: Annotated[
        Literal["text", "bytea"], typer.Option(help="The type of kafka_value, if the outbox must be created.")
    ] = "text",
    json_: JsonOption = False,
) -> None:
    """Create the outbox and its companion tables, or check and migrate existing ones.

    Safe to run repeatedly, and several times at once. An existing outbox is never changed.
    """
    settings = options.load()
    if print_:
        if json_:
            raise typer.BadParameter("--print writes SQL, --json a result: choose one", param_hint="--json")
        _print_sql(settings, notify=bool(notify), functions=bool(functions), value_type=value_type)
        return

    from harvester.outbox.archive import SILENCE_S
    from harvester.outbox.schema import init as init_schema

    with (
        spinner(f"setting up {settings.table}"),
        connected(settings, "init", silence_s=SILENCE_S) as connection,
    ):
        done = init_schema(
            connection,
            settings.table,
            notify=notify,
            functions=functions,
            value_type=value_type,
            archive=settings.archive != "off",
            archive_retention=settings.archive_retention,
        )
    if json_:
        print_json({"outbox": str(settings.table), "done": done})
        return
    for line in done or ["nothing to do: the schema is complete"]:
        typer.echo(line)


def _print_sql(settings: Config, *, notify: bool, functions: bool, value_type: KafkaType) -> None:
    from harvester.outbox.schema import find_shape, sql

    # Migration tools often run where the database cannot be reached; then the tables are assumed to be new.
    try:
        with connected(settings, "init") as connection:
            shape = find_shape(connection, settings.table)
        found = "the outbox that exists" if shape else "a new outbox"
    except DatabaseUnavailable as error:
        typer.echo(f"harvester: {error}; the SQL is for a new outbox", err=True)
        shape, found = None, "a new outbox"
    typer.echo(f"-- The schema of the harvester, for {found}. May be run more than once.")
    text = sql(
        settings.table,
        shape,
        notify,
        functions=functions,
        value_type=value_type,
        archive=settings.archive != "off",
    )
    typer.echo(text, nl=False)


def _template(what: str, default: str) -> Any:
    return typer.Option(help=f"Template of the {what}. (default: {default})")


@grouped
def adopt(
    table: Annotated[str, typer.Argument(help="The table, as in SQL: outboxevent, shop.events.")],
    options: ConfigOptions,
    topic: Annotated[str | None, _template("topic", "outbox.event.{aggregatetype}")] = None,
    key: Annotated[str | None, _template("key; empty: no key, and no order", "{aggregateid}")] = None,
    value: Annotated[str | None, _template("value", "{payload}")] = None,
    header: Annotated[
        list[str] | None,
        typer.Option(
            "--header", metavar="NAME=TEMPLATE", help="A header; may be given several times. (default: id={id})"
        ),
    ] = None,
    headers_from: Annotated[
        str | None,
        typer.Option(
            "--headers-from",
            metavar="COLUMN",
            help="A column with further headers: a JSON object, or a text array of alternating names and values.",
        ),
    ] = None,
    no_headers: Annotated[bool, typer.Option("--no-headers", help="Add no other headers to records.")] = False,
    remove: Annotated[bool, typer.Option("--remove", help="Stop capturing the table.")] = False,
    print_: Annotated[bool, typer.Option("--print", help="Print the SQL and change nothing.")] = False,
) -> None:
    """Capture rows inserted into a table from now on as records, using a trigger; the defaults are Debezium's.

    In templates, {column} stands for a column of the row. Existing rows are left alone, and no row of the table is ever
    changed or deleted. Run again to change the routing.
    """
    if no_headers and header:
        raise typer.BadParameter("--header and --no-headers contradict each other", param_hint="--no-headers")
    settings = options.load()

    from harvester.outbox import adoption
    from harvester.outbox.sql.adoption import DEBEZIUM_HEADERS, Route

    templates = {name: text for name, text in (("topic", topic), ("key", key), ("value", value)) if text is not None}
    headers = () if no_headers else header or DEBEZIUM_HEADERS
    route = None if remove else Route.parse(**templates, headers=headers, headers_from=headers_from)
    with connected(settings, "adopt") as connection:
        if print_:
            typer.echo(adoption.script(connection, settings.table, table, route), nl=False)
            return
        adoption.adopt(connection, settings.table, table, route)
    if route is None:
        typer.echo(f"{table} is no longer captured")
    else:
        typer.echo(f"new rows of {table} are records of {settings.table}: {route}")


def _role(name: str, help_: str) -> Any:
    return typer.Option(name, metavar="ROLE", help=help_)


@grouped
def grants(
    options: ConfigOptions,
    relay: Annotated[list[str] | None, _role("--relay", "A role with which harvesters log in.")] = None,
    writer: Annotated[list[str] | None, _role("--writer", "A role that only adds records.")] = None,
    caller: Annotated[
        list[str] | None, _role("--caller", "A role that only calls the functions for writers (`init --functions`).")
    ] = None,
    monitor: Annotated[
        list[str] | None, _role("--monitor", "A role that only reads: `status`, `dead list` and `dead show`.")
    ] = None,
) -> None:
    """Print the SQL that gives roles the least privileges they need; changes nothing.

    The roles must exist. Run the SQL as the owner of the tables, after `harvester init`, and again after an update or a
    change of `archive` or `poison.notice_topic`:

        harvester grants --relay relay --writer app | psql --set ON_ERROR_STOP=1
    """
    if not relay and not writer and not caller and not monitor:
        raise typer.BadParameter("name a role with --relay, --writer, --caller or --monitor", param_hint="--relay")
    settings = options.load()

    from harvester.outbox.sql.grants import GrantTarget, script

    place = GrantTarget.of(
        settings.table,
        _facts(settings),
        archive=settings.archive != "off",
        notices=bool(settings.poison.notice_topic),
    )
    text = script(place, relays=relay or (), writers=writer or (), callers=caller or (), monitors=monitor or ())
    typer.echo(f"-- The least privileges on {settings.table}. May be run more than once.")
    typer.echo(text, nl=False)


def _facts(settings: Config) -> Facts | None:
    from harvester.outbox.connection import database_errors
    from harvester.outbox.schema import read_facts

    # Like `init --print`: if the database cannot be reached, the tables are assumed to be those of `init`.
    try:
        with connected(settings, "grants") as connection, database_errors(f"inspect {settings.table}"):
            return read_facts(connection, settings.table)
    except DatabaseUnavailable as error:
        typer.echo(f"harvester: {error}; the SQL is for the tables as created by `harvester init`", err=True)
        return None


@grouped
def move(
    options: ConfigOptions,
    unreleased: Annotated[
        bool,
        typer.Option("--unreleased", help="The old group's leader is certainly dead and did not release its term."),
    ] = False,
) -> None:
    """Give the outbox to the leader group and Kafka cluster of this configuration.

    First stop the harvesters to which it belongs. If the last of them was killed, start one of them once more and stop
    it; use --unreleased only if that is impossible: the first leader of the new group then waits for what the old one
    may still send, and if the old one was exactly-once, records may be published again.
    """
    settings = options.load_for_kafka()

    from harvester.outbox.connection import database_errors
    from harvester.outbox.leader_session import TermSession
    from harvester.wiring import expiry_s, owner_of

    ours = owner_of(settings)
    session = TermSession(settings.dsn, settings.table, "harvester move", 10.0)
    with closing(session), database_errors("move the outbox"):
        session.open()
        row = session.read_term()
        if row.owner == ours:
            typer.echo(f"nothing to do: {settings.table} belongs to {ours}")
            return
        if row.lent_to is not None:
            raise LeadershipError(f"{row.lent_to} has borrowed the term, or asks for it", hint="wait until it is done")
        if row.holder is not None and not unreleased:
            raise LeadershipError(
                f"{row.name!r} of {row.owner} has not released its term of {settings.table}",
                hint="stop its harvesters (SIGTERM); `harvester move --help` explains what to do if they were killed",
            )
        if not session.move(row, ours):
            raise LeadershipError(
                f"a harvester of {row.owner} has just taken or released the term of {settings.table}",
                hint="stop all of them, then run this again",
            )
    typer.echo(f"{settings.table} now belongs to {ours}, previously to {row.owner}")
    if row.holder is not None:
        typer.echo(f"its first leader waits {expiry_s(settings):.0f} s for what {row.name!r} may still send")
