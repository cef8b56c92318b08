"""Functions that commands share: print JSON and tables, show a spinner, connect to the database."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from contextlib import closing

    from rich.status import Status
    from rich.table import Table

    from harvester.config import Config
    from harvester.outbox.connection import Connection


def print_json(value: object, indent: int | None = None) -> None:
    """Print JSON on standard output."""
    import json

    typer.echo(json.dumps(value, indent=indent))


def print_rich(renderable: Any) -> None:
    """Print a table or the like, as wide as the terminal."""
    from rich.console import Console

    Console().print(renderable)


def spinner(what: str) -> Status:
    """A context manager that shows people what is going on; silent where standard error is no terminal."""
    from rich.console import Console

    return Console(stderr=True).status(f"{what} …")


def grid(rows: Iterable[tuple[str, str]], title: str | None = None) -> Table:
    """Two columns, name and value. Values are text, not markup: names and errors may contain brackets."""
    from rich.table import Table
    from rich.text import Text

    grid = Table(title=title and Text(title), title_justify="left", show_header=False, box=None, pad_edge=False)
    grid.add_column(style="bold")
    grid.add_column(overflow="fold")
    for name, value in rows:
        grid.add_row(name, Text(value))
    return grid


def connected(settings: Config, command: str) -> closing[Connection]:
    """A connection to the database for this command, closed at the end; raises DatabaseUnavailable."""
    from contextlib import closing

    from harvester.outbox.connection import connect

    return closing(connect(settings.dsn, application_name=f"harvester {command}"))
