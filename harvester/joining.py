"""What comes before a place in the group: tables that fit, an outbox that is known, and shards that can send."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import psycopg

from harvester.assembly import Parts
from harvester.config import Config
from harvester.errors import BrokerUnavailable, DatabaseUnavailable, HarvesterError
from harvester.journal import Journal
from harvester.neli.group import Identity
from harvester.outbox.connect import one_line
from harvester.outbox.term_session import Owner, TermSession

_SHARDS_WITHIN_S = 15.0


def await_identity(
    parts: Parts, config: Config, login: Callable[[], Config], journal: Journal, stopping: threading.Event
) -> Identity | None:
    """Check the tables and learn the outbox's identity, for as long as it takes; None when it is `stopping` before.

    `login` gives what connections are made with by now. Raises OutboxError, LeadershipError, BrokerError or
    psycopg.Error for what does not go away by waiting.
    """
    session = TermSession(config.dsn, config.table, f"harvester {config.name}", 10.0)
    while not stopping.is_set():
        try:
            session.log_in(login().dsn)
            session.open()
            session.refuse_pooler()
            outbox = session.identity()
            session.check_owner(session.read_term(), Owner(config.leader_group_id))
            if config.archive != "off":
                session.check_archive()
            parts.prepare(login())
        except (DatabaseUnavailable, BrokerUnavailable, psycopg.OperationalError) as error:
            what = "group" if isinstance(error, BrokerUnavailable) else "database"
            hint = f" ({error.hint})" if isinstance(error, HarvesterError) and error.hint else ""
            journal.trouble(what, f"{one_line(error)}{hint}")
            stopping.wait(config.limits.io_error_backoff.total_seconds())
            continue
        finally:
            session.close()
        journal.trouble("database", None)
        journal.trouble("group", None)
        return Identity(config.name, outbox, str(config.table))
    return None


def await_shards(parts: Parts, stopping: threading.Event) -> None:
    """A harvester whose shards cannot send yet should not be elected; nor should one bad shard keep it out."""
    deadline = time.monotonic() + _SHARDS_WITHIN_S
    while not stopping.is_set() and time.monotonic() < deadline:
        if parts.supervisor.shards_ready.wait(0.05):
            return
