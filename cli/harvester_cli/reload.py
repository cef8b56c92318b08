"""SIGHUP to a harvester without a terminal: read the configuration again, and apply what can be applied."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harvester.config import Config, Loaded
    from harvester.config.difference import Change
    from harvester.harvester import Harvester
    from harvester.telemetry.notify import Notifier

_SCALE_WITHIN_S = 30.0


def has_terminal() -> bool:
    """Whether this process has a controlling terminal, whose hang-up would send it SIGHUP (tty(4))."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


class Reloader(threading.Thread):
    """Reloads one after the other; those that are asked for meanwhile become one."""

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
        """The thread."""
        while True:
            self._asked.get()
            while not self._asked.empty():
                self._asked.get()
            self._notifier.reloading()
            try:
                said = self._reload()
            except Exception:  # noqa: BLE001 - the top frame: the harvester goes on with what it has
                self._log.exception("reload: nothing was changed")
                said = "reload: failed; nothing was changed"
            self._notifier.ready(said)

    def _reload(self) -> str:
        """Returns a line for the manager."""
        from harvester.errors import HarvesterError

        try:
            after = self._checked()
        except HarvesterError as error:
            self._log.error("reload: nothing was changed: %s", error)
            return "reload: the configuration is wrong; nothing was changed"
        from harvester.config.difference import changes

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
        """New connections log in with the new passwords; nothing else of what differs is let in by this."""
        from harvester.errors import HarvesterError

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
        from harvester.errors import ConfigurationError

        loaded = self._read()
        after = loaded.config
        if "name" not in loaded.given:  # it is made up from the time, among others
            after = after.model_copy(update={"name": self._config.name})
        problems = check_clients(after)
        if problems:
            raise ConfigurationError(problems, source=str(loaded.source) if loaded.source else None)
        return after

    def _apply(self, path: str, after: Config, what: str) -> bool:
        from harvester.errors import HarvesterError

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
