"""A database that claims to be another server than it is, in every process of a harvester (P9).

    HARVESTER_TEST_HOOKS=tests.support.places:make
    HARVESTER_TEST_PLAN=<directory>

The directory's file `timeline` holds the timeline that the server is said to be on; without it the real one is.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from harvester.failpoints import VARIABLE
from harvester.outbox import connection

from . import hooks

_FILE = "timeline"


def env(plan: hooks.Plan) -> dict[str, str]:
    """The environment of a harvester that believes the plan."""
    return {**plan.env, VARIABLE: f"{__name__}:make"}


def promote(plan: hooks.Plan, timeline: int) -> None:
    """From now on the server is on this timeline."""
    partial = plan.directory / f"{_FILE}.new"
    partial.write_text(str(timeline))
    partial.rename(plan.directory / _FILE)


def make() -> Any:
    """The factory that `harvester.failpoints` calls: the plan's hooks, and the claim."""
    file = Path(os.environ[hooks.PLAN]) / _FILE

    real = connection.server_identity

    def claimed(session: Any) -> tuple[int, int] | None:
        identity = real(session)
        if identity is None or not file.exists():
            return identity
        return identity[0], int(file.read_text())

    vars(connection)["server_identity"] = claimed
    return hooks.make()
