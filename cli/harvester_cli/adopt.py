"""`harvester adopt`: capture an existing table's rows as records."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from harvester_cli.options import ConfigOptions, grouped
from harvester_cli.output import connected


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
