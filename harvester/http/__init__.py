"""Serves a harvester's metrics, health, status and status page over HTTP, read-only: the extra `[http]`.

`server` has the server and its router, which the control socket shares; `pages` has a harvester's routes and metrics,
`consumers` the metrics of a coordinated consumer, `lake` those of the job `lake`. All but `server` need
prometheus-client.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from harvester.errors import ConfigurationError, Problem

if TYPE_CHECKING:
    from harvester.http.lake import LakeMetrics
    from harvester.http.pages import StatusSource
    from harvester.http.server import Trouble, WebServer

__all__ = ["lake_metrics", "require_http", "web_server"]


def web_server(listen: str, source: StatusSource, trouble: Trouble, say: Callable[[str], None]) -> WebServer:
    """The server for `http.listen`, not started yet; `say` receives what is worth a log line.

    Raises ConfigurationError if its library is not installed.
    """
    require_http()
    from harvester.http.pages import Pages
    from harvester.http.server import Router, WebServer

    return WebServer(*_address(listen), Router(Pages(source).routes()), trouble, say)


@contextmanager
def lake_metrics(listen: str, say: Callable[[str], None]) -> Iterator[LakeMetrics]:
    """The metrics of a lake's job, served at this address for the duration of the block.

    Raises ConfigurationError if the library is not installed.
    """
    _require_library("--listen")
    from harvester.http.lake import LakeMetrics

    metrics = LakeMetrics()
    server = metrics.server(*_address(listen), lambda text: say(text) if text else None, say)
    server.start()
    try:
        yield metrics
    finally:
        server.stop()


def require_http() -> None:
    """Raises ConfigurationError if `http.listen` lacks its library."""
    _require_library("http.listen", 'or "off"')


def _require_library(name: str, otherwise: str | None = None) -> None:
    if importlib.util.find_spec("prometheus_client") is None:
        problem = Problem(name, "needs prometheus-client, which is not installed", otherwise)
        raise ConfigurationError([problem], hint="pip install 'outbox-harvester[http]'")


def _address(listen: str) -> tuple[str, int]:
    host, _, port = listen.rpartition(":")
    return host.strip("[]"), int(port)
