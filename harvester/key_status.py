"""Everything about one key of a running harvester, for whoever asks why its records do not arrive."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from typing import Any

import psycopg

from harvester.config import Config
from harvester.errors import HarvesterError
from harvester.outbox.connection import connect, one_line
from harvester.outbox.overview import KeyRows, read_key
from harvester.relay.core.state_machine import LeadershipPhase, StateMachine
from harvester.relay.supervisor import Supervisor
from harvester.status import KeyStatus

_LEADING = (LeadershipPhase.LEADING, LeadershipPhase.REMARKING, LeadershipPhase.SCALING)
_CONNECT_WITHIN_S = 3
_LOOK_WITHIN_S = 3.0
_RELAY_WITHIN_S = 3.0
_TOO_LONG = f"it found no answer within {_LOOK_WITHIN_S:g} s: the outbox is large, or locked"


def _look(key: bytes, machine: StateMachine, now: float) -> dict[str, Any]:
    """What the relay knows of this key at `now`, as in `KeyStatus`. On the supervisor's thread."""
    queue = machine.planner.deferred.by_key.get(key)
    return {
        "leads": machine.phase in _LEADING,
        "shard": machine.planner.dispatcher.shard_of(key),
        "under_way": machine.ledger.count_of(key),
        "waiting": len(queue) + queue.fetching if queue is not None else 0,
        "retry_in_s": max(0.0, queue.not_before - now) if queue is not None and queue.parked else None,
        "held": queue is not None and queue.held,
    }


def key_status(supervisor: Supervisor, config: Config, key: str) -> KeyStatus:
    """What the relay and the database know of it. `config` says how to log in.

    Raises HarvesterError when the relay does not answer; that the database does not, the result says.
    """
    try:
        data = key.encode()
    except UnicodeEncodeError as error:
        raise HarvesterError(f"{key!r} is no text", hint="keys that are no UTF-8 cannot be looked up") from error
    # First the database: what is settled meanwhile must not seem to be under way without a row.
    rows, trouble = _read(config, data)
    known = supervisor.ask(partial(_look, data), _RELAY_WITHIN_S)
    if known is None:
        raise HarvesterError("the relay does not answer", hint="it is busy, or about to end; see its log")
    return KeyStatus(at=datetime.now(UTC), key=key, **known, **asdict(rows), trouble=trouble)


def _read(config: Config, key: bytes) -> tuple[KeyRows, str | None]:
    name = f"harvester {config.name}/key"
    try:
        with connect(config.dsn, application_name=name, connect_timeout_s=_CONNECT_WITHIN_S) as connection:
            connection.execute(f"SET statement_timeout = '{_LOOK_WITHIN_S * 1000:.0f}ms'")
            return read_key(connection, config.table, key), None
    except (HarvesterError, psycopg.Error) as error:
        timed_out = isinstance(error.__cause__ or error, psycopg.errors.QueryCanceled)
        return KeyRows(), _TOO_LONG if timed_out else one_line(error)
