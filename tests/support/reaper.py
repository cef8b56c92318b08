"""Takes a run's stack down as soon as the run is over: `python -m tests.support.reaper DIRECTORY`."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path


def main() -> None:
    """Wait for end-of-file on standard input, then stop and delete."""
    sys.stdin.buffer.read()
    from harvester import stack  # only now: most runs of a single test need no servers

    stack.down(Path(sys.argv[1]), delete=True)
    shutil.rmtree(sys.argv[1], ignore_errors=True)  # also where no server was ever started


if __name__ == "__main__":
    main()
