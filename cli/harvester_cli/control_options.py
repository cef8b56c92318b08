"""Which of the harvesters that run is meant: options and what they find."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

NameOption = Annotated[
    str | None,
    typer.Option("--name", help="The harvester of this name; without it the only one that runs.", show_default=False),
]
SocketOption = Annotated[
    Path | None,
    typer.Option("--socket", help="The harvester that listens on this Unix socket.", show_default=False),
]


def find(name: str | None, socket: Path | None) -> Path:
    """Its socket; raises NoHarvester or SeveralHarvesters."""
    from harvester.control import client

    if name is not None and socket is not None:
        raise typer.BadParameter("give one of --name and --socket")
    return client.find(name, socket)
