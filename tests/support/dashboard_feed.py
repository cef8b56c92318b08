"""A program that shows a synthetic Status on the live dashboard, for a test that watches its terminal.

    python -m tests.support.dashboard_feed interrupt|crash|exit-now

Meanwhile it makes noise, as a relay does: by Python's standard error, by the descriptor itself (as C code) and
by a child process. It ends by SIGINT, by an exception of the feed, or by `os._exit`, according to its argument.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from typing import NoReturn

from harvester_cli.dashboard import live

from harvester.status import Status
from tests.support.statuses import leading

NOISE_AT, END_AT = 3, 12  # frames


def main(ending: str) -> None:
    until = threading.Event()

    def interrupted(_signal: int, _frame: object) -> None:
        if ending == "exit-now":
            leave()
        until.set()

    def leave() -> NoReturn:
        live.restore_terminal()
        os._exit(130)

    signal.signal(signal.SIGINT, interrupted)
    frames = 0

    def status() -> Status:
        nonlocal frames
        frames += 1
        if frames == NOISE_AT:
            print("noise of python", file=sys.stderr)
            os.write(2, b"noise of c\n")
            subprocess.run(["sh", "-c", "echo noise of a child >&2"], check=True)
        if frames == END_AT and ending == "crash":
            raise SystemExit("the feed crashed")
        return leading()

    live.run(status, refresh_per_second=20, until=until)
    print("left in order")


if __name__ == "__main__":
    main(sys.argv[1])
