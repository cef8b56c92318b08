"""`harvester watch`: show the dashboard of harvesters on this machine, using their control sockets."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harvester.errors import ExitCode
from harvester_cli.options import ConfigOption

if TYPE_CHECKING:
    from harvester.control.protocol import ControlError
    from harvester.status import KeyStatus, Status

_LINES_EVERY_S = 10.0
_JSON_EVERY_S = 1.0

NamesOption = Annotated[
    list[str] | None, typer.Option("--name", help="The harvester of this name; may be given several times.")
]
SocketsOption = Annotated[
    list[Path] | None, typer.Option("--socket", help="The harvester on this Unix socket; may be given several times.")
]


def watch(
    name: NamesOption = None,
    socket: SocketsOption = None,
    config: ConfigOption = None,
    key: Annotated[str | None, typer.Option("--key", help="Show what is known about the records of this key.")] = None,
    once: Annotated[bool, typer.Option("--once", help="Print the current state and exit.")] = False,
    json_: Annotated[
        bool, typer.Option("--json", help="Print JSON, one line per harvester: once, or every second.")
    ] = False,
) -> None:
    """Show the state of running harvesters, all of them or selected ones; on a terminal, with keys.

    With a configuration file: the harvesters of its `control.socket` or `name`, if it sets one of them.

    Exits with 69 if none is running, or if one of several does not answer.
    """
    from harvester_cli.dashboard import live

    names, sockets = _named_by(config) if config is not None else ([], [])
    meant = _Meant([*(name or []), *names], [*(socket or []), *sockets])
    if once:
        _print_once(meant.find(), key, as_json=json_)
    elif not json_ and live.should_show("auto", sys.stdout):
        from harvester_cli.watch_live import watch_live

        meant.find()  # raises if none is running
        watch_live(meant.find_any, key)
    else:
        _follow(meant.find(), key, as_json=json_)


def _named_by(config: Path) -> tuple[list[str], list[Path]]:
    """Names and sockets of the harvesters configured by a file; raises NoHarvester if it switches the socket off."""
    from harvester.config import load

    loaded = load(config)
    socket = loaded.config.control.socket
    if socket == "off":
        from harvester.control.protocol import NoHarvester

        raise NoHarvester(
            f"{config} switches the control socket off", hint='set control.socket to "auto" or a path, and restart'
        )
    if socket != "auto":
        return [], [Path(socket)]
    # The default name differs from process to process.
    return [loaded.config.name] if "name" in loaded.given else [], []


class _Meant:
    """Selects harvesters: the named ones, or all running ones."""

    def __init__(self, names: list[str], sockets: list[Path]) -> None:
        self._names, self._sockets = names, sockets

    def find(self) -> list[Path]:
        """Their sockets, at least one; raises NoHarvester."""
        from harvester.control import client
        from harvester.control.protocol import SeveralHarvesters

        named = [*self._sockets, *(client.find(name, None) for name in self._names)]
        if named:
            return list(dict.fromkeys(named))
        try:
            return [client.find(None, None)]
        except SeveralHarvesters:
            return client.running()

    def find_any(self) -> list[Path]:
        """The same, possibly none."""
        from harvester.control.protocol import ControlError

        try:
            return self.find()
        except ControlError:
            return []


def _ask(path: Path, key: str | None) -> Status | KeyStatus:
    from harvester.control.client import Connection

    with Connection(path) as connection:
        return connection.status() if key is None else connection.key(key)


def _print(path: Path, told: Status | KeyStatus, *, as_json: bool) -> None:
    from harvester.status import KeyStatus, to_json

    if isinstance(told, KeyStatus):
        from harvester_cli.dashboard.figures import one_line
        from harvester_cli.dashboard.lines import key_words

        plain = [f"key {one_line(told.key)}", *(f"  {one_line(line)}" for line in key_words(told))]
        values = to_json(told)
    else:
        from harvester_cli.dashboard.live import status_line

        plain, values = [status_line(told)], to_json(told)
    typer.echo(json.dumps({"socket": str(path), **values}) if as_json else "\n".join(plain))


def _print_once(paths: list[Path], key: str | None, *, as_json: bool) -> None:
    """Print what those that answer say; raises typer.Exit at the end if one of several does not."""
    from harvester.control.protocol import ControlError

    failed = False
    for path in paths:
        try:
            _print(path, _ask(path, key), as_json=as_json)
        except ControlError as error:
            if len(paths) == 1:
                raise
            failed = True
            _complain(path, error)
    if failed:
        raise typer.Exit(ExitCode.UNAVAILABLE)


def _follow(paths: list[Path], key: str | None, *, as_json: bool) -> None:
    """Print lines periodically, until the last of them has ended; raises typer.Exit then if one of several did not
    answer.
    """
    from harvester.control.client import Connection
    from harvester.control.protocol import ControlError, NoHarvester

    connections: dict[Path, Connection | None] = dict.fromkeys(paths)
    failed = False
    while connections:
        for path, connection in list(connections.items()):
            try:
                opened = connections[path] = connection or Connection(path)
                _print(path, opened.status() if key is None else opened.key(key), as_json=as_json)
            except ControlError as error:
                has_ended = connection is not None and isinstance(error, NoHarvester)
                if len(paths) == 1 and not has_ended:
                    raise
                failed = failed or not has_ended
                _complain(path, error)
                if (gone := connections.pop(path)) is not None:
                    gone.close()
        if connections:
            time.sleep(_JSON_EVERY_S if as_json else _LINES_EVERY_S)
    if failed:
        raise typer.Exit(ExitCode.UNAVAILABLE)


def _complain(path: Path, error: ControlError) -> None:
    typer.echo(f"harvester: {'' if str(path) in error.message else f'{path}: '}{error.message}", err=True)
