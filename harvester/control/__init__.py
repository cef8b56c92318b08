"""Controlling a running harvester over a Unix socket: what is said, who listens, who asks, and where they meet."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harvester.config import Config
    from harvester.control.server import Controlled, ControlServer, Log

__all__ = ["control_server"]


def control_server(config: Config, harvester: Controlled, log: Log) -> ControlServer | None:
    """The server that the configuration asks for, listening but not started; None when it is switched off.

    Raises ControlError when there is no place for the socket, or a live harvester of that name has it.
    """
    import os
    import tempfile
    from pathlib import Path

    from harvester.control.server import ControlServer, Desk
    from harvester.control.sockets import Listener, choices, file_name, listen, listen_in_first

    where, uid = config.control.socket, os.geteuid()
    if where == "off":
        return None
    listener: Listener
    if where == "auto":
        folders = choices(os.environ, uid, tempfile.gettempdir())
        listener = listen_in_first(folders, file_name(config.name), uid)
    else:
        listener = listen(Path(where), uid)
    return ControlServer(listener, Desk(harvester, log), log)
