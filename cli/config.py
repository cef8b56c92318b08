"""`harvester config`."""

from __future__ import annotations

import typer

app = typer.Typer(no_args_is_help=True)


@app.command("todo")
def todo() -> None:
    """Not there yet."""
    raise NotImplementedError
