"""`harvester adopt`: make records of the rows of a table that is there already."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from harvester_cli.options import ConfigOption, SetOption, load


def _template(what: str, default: str) -> Any:
    return typer.Option(help=f"Template of the {what}. (default: {default})", show_default=False)


def adopt(
    table: Annotated[str, typer.Argument(help="The table, as in SQL: outboxevent, shop.events.", show_default=False)],
    config: ConfigOption = None,
    set_: SetOption = None,
    topic: Annotated[str | None, _template("topic", "outbox.event.{aggregatetype}")] = None,
    key: Annotated[str | None, _template("key; empty: no key, and no order", "{aggregateid}")] = None,
    value: Annotated[str | None, _template("value", "{payload}")] = None,
    header: Annotated[
        list[str] | None,
        typer.Option(
            "--header",
            metavar="NAME=TEMPLATE",
            help="A header; may be given several times. (default: id={id})",
            show_default=False,
        ),
    ] = None,
    no_headers: Annotated[bool, typer.Option("--no-headers", help="Records get no headers.")] = False,
    remove: Annotated[bool, typer.Option("--remove", help="Stop capturing the table.")] = False,
    print_: Annotated[bool, typer.Option("--print", help="Print the SQL, and change nothing.")] = False,
) -> None:
    """Make a record of each row that is inserted into a table from now on, by a trigger; Debezium's columns by default.

    In templates {column} stands for a column of the row. Rows that are in the table already are left alone, and no row
    of it is ever changed or deleted. Run again to route differently.
    """
    if no_headers and header:
        raise typer.BadParameter("--header and --no-headers contradict each other", param_hint="--no-headers")
    settings = load(config, set_)

    from contextlib import closing

    from harvester.outbox import adoption
    from harvester.outbox.connection import connect
    from harvester.outbox.sql.adoption import DEBEZIUM_HEADERS, Route

    templates = {name: text for name, text in (("topic", topic), ("key", key), ("value", value)) if text is not None}
    route = None if remove else Route.parse(**templates, headers=() if no_headers else header or DEBEZIUM_HEADERS)
    with closing(connect(settings.dsn, application_name="harvester adopt")) as connection:
        if print_:
            for statement in adoption.statements(connection, settings.table, table, route):
                typer.echo(f"{statement};\n")
            return
        adoption.adopt(connection, settings.table, table, route)
    if route is None:
        typer.echo(f"{table} is no longer captured")
    else:
        typer.echo(f"new rows of {table} are records of {settings.table}: {route}")
