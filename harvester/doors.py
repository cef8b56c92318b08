"""Where a running harvester can be reached: its pages over HTTP, and the control socket."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from harvester.config import Config
from harvester.errors import HarvesterError
from harvester.journal import Journal

if TYPE_CHECKING:
    from harvester.control.desk import Controlled
    from harvester.control.server import ControlServer
    from harvester.http import Source, WebServer

Log = logging.Logger | logging.LoggerAdapter[logging.Logger]


class Doors:
    """Each is open if the configuration says so. Opened once, in the order of the methods."""

    def __init__(self, config: Config, journal: Journal, log: Log, *, shown: Source, controlled: Controlled) -> None:
        self._config, self._journal, self._log = config, journal, log
        self._shown, self._controlled = shown, controlled
        self._web: WebServer | None = None
        self._control: ControlServer | None = None

    def prepare(self) -> None:
        """Raises ConfigurationError where the library for HTTP is wanted and not installed."""
        listen = self._config.http.listen
        if listen == "off":
            return
        from harvester.http import web_server

        self._web = web_server(listen, self._shown, lambda text: self._journal.trouble("http", text), self._log.info)

    def open_web(self) -> None:
        """Serve what is asked for over HTTP."""
        if self._web is not None:
            self._web.start()

    def open_control(self) -> None:
        """Listen on the control socket; the relay goes on without one where none can be had."""
        from harvester.control import control_server

        try:
            server = control_server(self._config, self._controlled, self._log)
        except HarvesterError as error:
            self._log.warning("%s", f"control: {error.message} ({error.hint})")
            self._journal.note(f"control: {error.message}")
            return
        if server is not None:
            server.start()
            self._log.debug("listens on the control socket %s", server.path)
        self._control = server

    def close(self) -> None:
        """Serve nobody any more."""
        if self._web is not None:
            self._web.stop()
        if self._control is not None:
            self._control.stop()
