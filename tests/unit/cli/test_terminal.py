"""The terminal of tests: what is still on the way in it when the process has ended."""

from __future__ import annotations

import time

from tests.support.terminal import OnTerminal
from tests.support.wait import eventually


class Late(OnTerminal):
    """Read a while after the process has ended."""

    def _read(self) -> None:
        eventually(lambda: hasattr(self, "process") and self.process.poll() is not None, 60, "its end")
        time.sleep(0.2)
        super()._read()


def test_who_has_waited_has_seen_all() -> None:
    with Late("--version") as terminal:
        assert terminal.wait() == 0
        assert b"harvester" in terminal.raw
        assert terminal.raw.endswith(b"\n")
        assert terminal.wait() == 0  # again
