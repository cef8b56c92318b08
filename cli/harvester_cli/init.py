"""`harvester init`: create, check and migrate the schema, or show it as SQL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from harvester.errors import DatabaseUnavailable
from harvester_cli.options import JsonOption, LoggedOptions, grouped
from harvester_cli.output import connected, print_json, spinner

if TYPE_CHECKING:
    from harvester.config import Config
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

    from harvester.outbox.schema import init as init_schema

    with spinner(f"setting up {settings.table}"), connected(settings, "init") as connection:
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
