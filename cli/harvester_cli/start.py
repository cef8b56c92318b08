"""`harvester start`: run a harvester until it is told to stop."""

from __future__ import annotations

import os
import signal
import sys
import threading
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harvester_cli.options import ConfigOption, LogLevelOption, SetOption, load_with_origin
from harvester_cli.reload import Reloader, has_terminal

if TYPE_CHECKING:
    from harvester.harvester import Harvester
    from harvester.telemetry.notify import Notifier


class DashboardMode(str, Enum):  # noqa: UP042 - typer shows the values of a str enum
    """When to draw the live dashboard."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


def start(
    config: ConfigOption = None,
    set_: SetOption = None,
    log_level: LogLevelOption = None,
    shards: Annotated[
        int | None, typer.Option("--shards", min=1, help="Shard processes (limits.shards).", show_default=False)
    ] = None,
    dashboard: Annotated[
        DashboardMode, typer.Option("--dashboard", help="Live dashboard; auto: when standard output is a terminal.")
    ] = DashboardMode.AUTO,
    until_empty: Annotated[
        bool, typer.Option("--until-empty", help="Stop, with exit code 0, when leading and the outbox is empty.")
    ] = False,
) -> None:
    """Move outbox rows to Kafka until stopped (SIGTERM or Ctrl-C: gracefully; a second one: at once).

    Without a terminal SIGHUP reads the configuration again.
    """
    overrides = list(set_ or ())
    if shards is not None:
        overrides.append(f"limits.shards={shards}")
    read = partial(load_with_origin, config, overrides, log_level)
    settings = read().config

    from harvester.config import check_clients
    from harvester.errors import ConfigurationError
    from harvester.harvester import Harvester
    from harvester.telemetry.logging import configure, logger_for
    from harvester.telemetry.notify import Notifier
    from harvester.telemetry.process import calm_collector
    from harvester_cli.dashboard import live, plain
    from harvester_cli.service import tell_manager

    problems = check_clients(settings)
    if problems:
        raise ConfigurationError(problems, hint="`harvester config check` names the same")
    logger = configure(settings.logging.level, name=settings.name)
    calm_collector()
    harvester = Harvester(settings, until_empty=until_empty)
    done = threading.Event()
    notifier = Notifier.from_environment()
    stopper = _Stopper(harvester, notifier)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stopper)
    reloader = Reloader(harvester, settings, read, notifier, logger_for(logger, settings.name))
    _on_hangup(stopper, reloader)
    threading.Thread(target=_watch, args=(harvester, done), name="watch", daemon=True).start()
    show = live.should_show(dashboard.value, sys.stdout)

    def status() -> Any:
        if not stopper.started:
            stopper.started = True
            harvester.start()
            notifier.ready("started")
            reloader.start()
            if "NOTIFY_SOCKET" in os.environ:
                arguments = (harvester, notifier, done)
                threading.Thread(target=tell_manager, args=arguments, name="notify", daemon=True).start()
        return harvester.status()

    # The dashboard is up before the first shard starts, so that nothing a shard prints tears the screen.
    if show:
        live.run(status, until=done)
    else:
        plain.run(status, until=done)
    if show:
        print(plain.status_line(harvester.status()))
    harvester.wait()
    if stopper.forced:
        raise typer.Exit(130)


def _watch(harvester: Harvester, done: threading.Event) -> None:
    try:
        harvester.wait()
    except Exception:  # noqa: BLE001, S110 - raised again, to the user, by `start`
        pass
    finally:
        done.set()


def _on_hangup(stopper: _Stopper, reloader: Reloader) -> None:
    """SIGHUP: the terminal was closed, which stops; where there is none, a wish to reload. nohup(1) is respected."""
    if not has_terminal():
        signal.signal(signal.SIGHUP, lambda _number, _frame: reloader.request())
    elif signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, stopper)


class _Stopper:
    """First signal: stop gracefully. Second: stop at once. Third: leave."""

    def __init__(self, harvester: Harvester, notifier: Notifier) -> None:
        self._harvester, self._notifier = harvester, notifier
        self._count = 0
        self.started = False

    @property
    def forced(self) -> bool:
        """Whether the drain was cut short."""
        return self._count > 1

    def __call__(self, _number: int, _frame: Any) -> None:
        self._count += 1
        if self._count > 2:
            from harvester_cli.dashboard.live import restore_terminal

            restore_terminal()
            os._exit(130)
        self._notifier.stopping("finishing what is on the wire" if self._count == 1 else "stopping at once")
        threading.Thread(target=self._harvester.stop, kwargs={"force": self.forced}, name="stop", daemon=True).start()
