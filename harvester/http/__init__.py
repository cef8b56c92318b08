"""Serves a harvester's metrics, health, status and status page over HTTP, read-only: the extra `[http]`.

`server` has the server and its router, which the control socket shares; `pages` has a harvester's routes and metrics,
`consumers` the metrics of a coordinated consumer. Only these two need prometheus-client.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING

from harvester.errors import ConfigurationError, Problem

if TYPE_CHECKING:
    from harvester.http.pages import StatusSource
    from harvester.http.server import Trouble, WebServer

__all__ = ["web_server"]


def web_server(listen: str, source: StatusSource, trouble: Trouble, say: Callable[[str], None]) -> WebServer:
    """The server for `http.listen`, not started yet; `say` receives what is worth a log line.

    Raises ConfigurationError if its library is not installed.
    """
    if importlib.util.find_spec("prometheus_client") is None:
        problem = Problem("http.listen", "needs prometheus-client, which is not installed", 'or "off"')
        raise ConfigurationError([problem], hint="pip install 'outbox-harvester[http]'")
    from harvester.http.pages import Pages
    from harvester.http.server import Router, WebServer

    host, _, port = listen.rpartition(":")
    return WebServer(host.strip("[]"), int(port), Router(Pages(source).routes()), trouble, say)
