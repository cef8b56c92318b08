"""Functions shared by commands: print JSON and tables, show a spinner, connect to the database."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from contextlib import closing
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status
    from rich.table import Table

    from harvester.config import Config
    from harvester.outbox.connection import Connection


def print_json(value: object, indent: int | None = None) -> None:
    """Print JSON on standard output."""
    typer.echo(json.dumps(value, indent=indent))


_UNWRAPPED = 100_000


def is_ascii() -> bool:
    """Whether the user has set the locale C: Python itself writes UTF-8 in it."""
    named = next((value for name in ("LC_ALL", "LC_CTYPE", "LANG") if (value := os.environ.get(name))), "")
    return named in ("C", "POSIX")


def console(*, stderr: bool = False, **options: Any) -> Console:
    """A rich console: it draws in ASCII in the locale C, and wraps nothing if it is not a terminal."""
    from rich.console import Console

    class Ours(Console):
        @property
        def encoding(self) -> str:
            return "ascii" if is_ascii() else super().encoding

        def on_broken_pipe(self) -> NoReturn:
            raise  # noqa: PLE0704 - the library calls this with the error at hand, and would exit with 1

    stream = sys.stderr if stderr else sys.stdout
    if stream is None or not stream.isatty():
        options.setdefault("width", _UNWRAPPED)
    return Ours(stderr=stderr, **options)


def print_rich(renderable: Any) -> None:
    """Print a table or the like, as wide as the terminal; without a terminal, a row is one line."""
    console().print(renderable)


def spinner(what: str) -> Status:
    """A context manager that shows progress to people; silent if standard error is not a terminal."""
    dots = "..." if is_ascii() else "…"
    return console(stderr=True).status(f"{what} {dots}", spinner="line" if is_ascii() else "dots")


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


def connected(settings: Config, command: str, silence_s: float | None = None) -> closing[Connection]:
    """A connection to the database for this command, closed at the end; raises DatabaseUnavailable.

    `silence_s`: how long the server may take to answer a statement; None: as usual.
    """
    from harvester.outbox.connection import SILENCE_S, connect

    return closing(connect(settings.dsn, application_name=f"harvester {command}", silence_s=silence_s or SILENCE_S))


def discard(stream: TextIO) -> None:
    """Discard what is left in the buffer; otherwise its flush at exit would turn a good exit code into 120."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
