"""`harvester start`: run a harvester until it is told to stop."""

from __future__ import annotations

import os
import signal
import sys
import threading
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import ConfigOption, LogLevelOption, SetOption, load

if TYPE_CHECKING:
    from harvester.harvester import Harvester

_STATUS_EVERY_S = 2.0


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
    """Move outbox rows to Kafka until stopped (SIGTERM or Ctrl-C: gracefully; a second one: at once)."""
    overrides = list(set_ or ())
    if shards is not None:
        overrides.append(f"limits.shards={shards}")
    settings = load(config, overrides, log_level)

    from harvester.config import check_clients
    from harvester.errors import ConfigurationError
    from harvester.harvester import Harvester
    from harvester.telemetry.logging import configure
    from harvester.telemetry.notify import Notifier
    from harvester.telemetry.process import calm_collector

    from .dashboard import live, plain

    problems = check_clients(settings)
    if problems:
        raise ConfigurationError(problems, hint="`harvester config check` names the same")
    configure(settings.logging.level, name=settings.name)
    calm_collector()
    harvester = Harvester(settings, until_empty=until_empty)
    done = threading.Event()
    notifier = Notifier.from_environment()
    stopper = _Stopper(harvester, notifier)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stopper)
    threading.Thread(target=_watch, args=(harvester, done), name="watch", daemon=True).start()
    threading.Thread(target=_tell_manager, args=(harvester, notifier, done), name="notify", daemon=True).start()
    show = live.should_show(dashboard.value, sys.stdout)

    def status() -> Any:
        if not stopper.started:
            stopper.started = True
            harvester.start()
            notifier.ready("started")
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


def _tell_manager(harvester: Harvester, notifier: Any, done: threading.Event) -> None:
    """Keep `systemctl status` informed, where there is a service manager."""
    from .dashboard.plain import status_line

    if "NOTIFY_SOCKET" not in os.environ:
        return
    while not done.wait(_STATUS_EVERY_S):
        notifier.status(status_line(harvester.status()).split(" ", 2)[-1])


class _Stopper:
    """First signal: stop gracefully. Second: stop at once. Third: leave."""

    def __init__(self, harvester: Harvester, notifier: Any) -> None:
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
            from .dashboard.live import restore_terminal

            restore_terminal()
            os._exit(130)
        self._notifier.stopping("finishing what is on the wire" if self._count == 1 else "stopping at once")
        threading.Thread(target=self._harvester.stop, kwargs={"force": self.forced}, name="stop", daemon=True).start()
