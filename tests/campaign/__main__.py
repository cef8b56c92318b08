"""`python -m tests.campaign relay|coordination`: the command behind scripts/faults and scripts/coordination-faults."""

from __future__ import annotations

import sys

from . import frame
from .coordination.run import COMMAND as COORDINATION
from .relay.run import COMMAND as RELAY

if __name__ == "__main__":
    frame.main({"relay": RELAY, "coordination": COORDINATION}[sys.argv[1]], sys.argv[2:])
