"""`harvester start`: run a harvester until it is stopped.

It notifies a service manager when it is ready, what it is doing, and that it makes progress. Without a terminal, SIGHUP
reloads the configuration: what can be applied to a running harvester is applied, the rest is listed.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from harvester.errors import ConfigurationError, HarvesterError
from harvester_cli.options import LoggedOptions, grouped
from harvester_cli.signals import aside

if TYPE_CHECKING:
    from harvester.config import Config, Loaded
    from harvester.config.describe import Change
    from harvester.harvester import Harvester
    from harvester.relay.forkserver import Forkserver
    from harvester.telemetry.notify import Notifier

Dashboard = Literal["auto", "on", "off"]

_STATUS_EVERY_S = 2.0
_START_S = 30.0  # in addition to systemd's limit for a start, which is 90 s unless set in the unit
_READY_LOOK_S = 0.25
_LOOKS = 4  # checks of the mark loop per watchdog interval


def tell_manager(harvester: Harvester, notifier: Notifier, done: threading.Event) -> None:
    """Keep the service manager informed until `done`; runs on its own thread.

    Start-up is complete when the harvester is ready, as defined for `/readyz`. Until then the manager's limit for a
    start is extended repeatedly. Watchdog pings are sent only while the mark loop progresses.
    """
    from harvester_cli.dashboard.live import status_line

    while (unready := harvester.unready()) is not None:
        notifier.extend_start(_START_S, f"{harvester.state.value}: {unready}")
        if done.wait(_READY_LOOK_S):
            return
    notifier.ready(harvester.state.value)
    notifier.widen_watchdog(least_watchdog_s(harvester.config.limits.heartbeat_timeout.total_seconds()))
    watchdog_s = notifier.watchdog_s
    every_s = _STATUS_EVERY_S if watchdog_s is None else min(_STATUS_EVERY_S, watchdog_s / _LOOKS)
    seen = harvester.progress()
    while not done.wait(every_s):
        notifier.status(status_line(harvester.status()).split(" ", 2)[-1])
        progress = harvester.progress()
        if watchdog_s is not None and progress != seen:
            seen = progress
            notifier.watchdog()


def least_watchdog_s(heartbeat_s: float) -> float:
    """The shortest watchdog interval that indicates a stuck loop: a statement may take 6 H, followed by another."""
    return 12 * heartbeat_s + 10


_SCALE_WITHIN_S = 30.0


def has_terminal() -> bool:
    """Whether this process has a controlling terminal, whose hang-up would send it SIGHUP (tty(4))."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


class Reloader(threading.Thread):
    """Reloads the configuration on request; requests that arrive during a reload are combined."""

    def __init__(
        self,
        harvester: Harvester,
        config: Config,
        read: Callable[[], Loaded],
        notifier: Notifier,
        log: logging.Logger | logging.LoggerAdapter[logging.Logger],
    ) -> None:
        super().__init__(name="reload", daemon=True)
        self._harvester, self._config, self._read = harvester, config, read
        self._notifier, self._log = notifier, log
        self._asked: queue.SimpleQueue[None] = queue.SimpleQueue()

    def request(self) -> None:
        """Reload soon. Safe in a signal handler."""
        self._asked.put(None)

    def run(self) -> None:
        while True:
            self._asked.get()
            while not self._asked.empty():
                self._asked.get()
            self._notifier.reloading()
            try:
                said = self._reload()
            except Exception:  # noqa: BLE001 - the top frame: the harvester continues with what it has
                self._log.exception("reload: nothing was changed")
                said = "reload: failed; nothing was changed"
            self._notifier.reloaded(said)

    def _reload(self) -> str:
        """Reload; returns a line for the service manager."""
        try:
            after = self._checked()
        except HarvesterError as error:
            self._log.error("reload: nothing was changed: %s", error)
            return "reload: the configuration is wrong; nothing was changed"
        from harvester.config.describe import changes

        found = changes(self._config, after)
        if not found:
            self._log.info("reload: nothing differs")
        for change in found:
            if not change.live:
                self._log.warning("reload: needs a restart: %s", change)
        passwords = [change for change in found if change.password]
        if passwords and not self._renew(after, passwords):
            return "reload: passwords could not be renewed"
        others = [change for change in found if change.live and not change.password]
        failed = [change.path for change in others if not self._apply(change.path, after, str(change))]
        waiting = sum(not change.live for change in found)
        applied = len(found) - waiting - len(failed)
        return f"reload: {applied} applied, {waiting} need a restart, {len(failed)} failed"

    def _renew(self, after: Config, passwords: Sequence[Change]) -> bool:
        """Use the new passwords for new connections; no other difference is accepted with this."""
        given: dict[str, Any] = {}
        for change in passwords:
            table, _, option = change.path.partition(".")
            if option:
                given[table] = {**getattr(self._config, table), option: getattr(after, table)[option]}
            else:
                given[table] = getattr(after, table)
        config = self._config.model_copy(update=given)
        try:
            self._harvester.renew_logins(config)
        except HarvesterError as error:
            self._log.error("reload: passwords could not be renewed: %s", error)
            return False
        self._config = config
        for change in passwords:
            self._log.info("reload: applied to new connections: %s", change)
        return True

    def _checked(self) -> Config:
        from harvester.config import check_clients

        loaded = self._read()
        after = loaded.config
        if "name" not in loaded.given:  # the default includes the time
            after = after.model_copy(update={"name": self._config.name})
        problems = check_clients(after)
        if problems:
            raise ConfigurationError(problems, source=str(loaded.source) if loaded.source else None)
        return after

    def _apply(self, path: str, after: Config, what: str) -> bool:
        try:
            if path == "logging.level":
                self._harvester.set_log_level(after.logging.level)
                self._config = self._config.model_copy(update={"logging": after.logging})
            else:
                shards = after.limits.shards
                if not self._harvester.scale(shards, _SCALE_WITHIN_S):
                    text = f"not everything under way was settled within {_SCALE_WITHIN_S:g} s; reload again"
                    raise HarvesterError(text)
                limits = self._config.limits.model_copy(update={"shards": shards})
                self._config = self._config.model_copy(update={"limits": limits})
        except HarvesterError as error:
            self._log.error("reload: could not be applied: %s: %s", what, error)
            return False
        self._log.info("reload: applied: %s", what)
        return True


@grouped
def start(
    options: LoggedOptions,
    shards: Annotated[int | None, typer.Option("--shards", min=1, help="Shard processes (limits.shards).")] = None,
    dashboard: Annotated[
        Dashboard,
        typer.Option("--dashboard", help="Live dashboard; auto: when standard output is a terminal."),
    ] = "auto",
    until_empty: Annotated[
        bool,
        typer.Option(
            "--until-empty", help="Stop, with exit code 0, when this harvester leads and the outbox is empty."
        ),
    ] = False,
) -> None:
    """Move outbox rows to Kafka until stopped (SIGTERM or Ctrl-C: gracefully; a second one: at once).

    Without a terminal, SIGHUP reloads the configuration.
    """
    forkserver = _forkserver()
    try:
        _run(options, shards, dashboard, forkserver, until_empty=until_empty)
    finally:
        forkserver.close()


def _forkserver() -> Forkserver:
    """A server of shards that imports what they need while this process imports what it needs itself."""
    from harvester.relay.forkserver import Forkserver

    forkserver = Forkserver()
    with suppress(OSError):  # it is started again when a shard needs it
        forkserver.is_up()
    return forkserver


def _run(
    options: LoggedOptions, shards: int | None, dashboard: Dashboard, forkserver: Forkserver, *, until_empty: bool
) -> None:
    overrides = [] if shards is None else [f"limits.shards={shards}"]
    read = partial(options.load_with_origin, *overrides)
    settings = read().config

    from harvester.config import check_clients
    from harvester.harvester import Harvester
    from harvester.telemetry.logging import configure, logger_for
    from harvester.telemetry.notify import Notifier
    from harvester.telemetry.process import calm_memory
    from harvester_cli.dashboard import live

    problems = check_clients(settings)
    if problems:
        raise ConfigurationError(problems, hint="`harvester config check` lists the same problems")
    logger = configure(settings.logging.level, name=settings.name)
    calm_memory()
    harvester = Harvester(settings, until_empty=until_empty, forkserver=forkserver)
    done = threading.Event()
    notifier = Notifier.from_environment()
    stopper = _Stopper(harvester, notifier)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stopper)
    reloader = Reloader(harvester, settings, read, notifier, logger_for(logger, settings.name))
    _on_hangup(stopper, reloader)
    threading.Thread(target=_watch, args=(harvester, done), name="watch", daemon=True).start()
    show = live.should_show(dashboard, sys.stdout)

    def status() -> Any:
        if not stopper.started:
            stopper.started = True
            harvester.start()
            reloader.start()
            if "NOTIFY_SOCKET" in os.environ:
                arguments = (harvester, notifier, done)
                threading.Thread(target=tell_manager, args=arguments, name="notify", daemon=True).start()
        return harvester.status()

    # The dashboard is shown before the first shard starts, so that no shard's output disturbs the screen.
    if show:
        live.run(status, until=done)
    else:
        log = logger_for(logger, settings.name) if live.one_output() else None
        live.run_plain(status, until=done, log=log)
    if show:
        print(live.status_line(harvester.status()))
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
    """SIGHUP: the terminal was closed, so stop; without a terminal, reload. nohup(1) is respected."""
    if not has_terminal():
        signal.signal(signal.SIGHUP, lambda _number, _frame: reloader.request())
    elif signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, stopper)


class _Stopper:
    """First signal: stop gracefully. Second: stop at once. Third: exit."""

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
        aside(partial(self._harvester.stop, force=self.forced))
