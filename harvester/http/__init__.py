"""What a harvester says over HTTP: metrics, health, its status, and a page that shows it. An extra: `[http]`.

`exposition` and `pages` turn snapshots into text; `server` is the thin part that listens. Read-only throughout: there
is no request that changes anything.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

from harvester.errors import ConfigurationError, Problem
from harvester.http.pages import Pages, StatusSource
from harvester.http.server import Trouble, WebServer

OFF = "off"

__all__ = ["OFF", "StatusSource", "WebServer", "web_server"]


def web_server(listen: str, source: StatusSource, trouble: Trouble, say: Callable[[str], None]) -> WebServer:
    """The server for `http.listen`, not yet started; `say` gets what is worth a line in the log.

    Raises ConfigurationError where its library is not installed.
    """
    if importlib.util.find_spec("prometheus_client") is None:
        problem = Problem("http.listen", "needs prometheus-client, which is not installed", 'or "off"')
        raise ConfigurationError([problem], hint="pip install 'harvester[http]'")
    host, _, port = listen.rpartition(":")
    return WebServer(host.strip("[]"), int(port), Pages(source).answer, trouble, say)
