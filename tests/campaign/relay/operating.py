"""What operators do to a running harvester, over its control socket; a refusal is an answer like any other."""

from __future__ import annotations

import contextlib
import random
import time

from harvester.control.client import Connection
from harvester.errors import HarvesterError

from .field import Field

_SETTLES_WITHIN_S = 5.0
_ANSWERS_S = 20.0


def operate(field: Field, kind: str, hold_s: float, rng: random.Random) -> str | None:
    """Scale, pause and resume, or remark; None: there is no harvester."""
    process = field.pick(rng)
    if process is None:
        return None
    try:
        with Connection(field.socket_of(process.name), _ANSWERS_S) as connection:
            if kind == "scale":
                shards = rng.choice([1, 2, 3, 4])
                connection.ask(kind, answers_s=_ANSWERS_S, shards=shards, within_s=_SETTLES_WITHIN_S)
                return f"{process.name} to {shards}"
            connection.ask(kind, answers_s=_ANSWERS_S)
    except HarvesterError as refusal:
        return f"{process.name}, which answers: {refusal}"
    if kind == "pause":
        time.sleep(hold_s)
        resume(field, process.name)
    return process.name


def resume(field: Field, name: str) -> None:
    """The end of a pause, if the harvester still runs."""
    with contextlib.suppress(HarvesterError), Connection(field.socket_of(name), _ANSWERS_S) as connection:
        connection.ask("resume", answers_s=_ANSWERS_S)
