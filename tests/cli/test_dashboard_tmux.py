"""The live dashboard on a real terminal (a tmux pane): what is on the screen, and what is left afterwards."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from harvester_cli.dashboard.render import OffScreenOutput, render

from tests.support.statuses import leading
from tests.support.wait import eventually

ROOT = Path(__file__).parents[2]
NOISE = ["noise of python", "noise of c", "noise of a child"]

pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")


class Pane:
    """One tmux server with one pane, 80×24 at first, that runs the feed inside a shell."""

    def __init__(self, socket: Path, ending: str) -> None:
        self._tmux = ["tmux", "-u", "-f", os.devnull, "-S", str(socket)]
        feed = shlex.join([sys.executable, "-m", "tests.support.dashboard_feed", ending])
        # The shell outlives the Ctrl-C that it gets together with the feed.
        script = f"trap : INT; echo shell before; {feed}; echo shell after, code $?; stty -a; exec cat"
        environment = {name: value for name, value in os.environ.items() if name not in ("TMUX", "NO_COLOR", "TMPDIR")}
        environment |= {"LC_ALL": "C.UTF-8", "TMPDIR": str(socket.parent), "COLUMNS": "132"}
        subprocess.run(
            [*self._tmux, "new-session", "-d", "-x", "80", "-y", "24", "sh", "-c", script],
            cwd=ROOT,
            env=environment,
            check=True,
        )

    def tmux(self, *arguments: str) -> str:
        return subprocess.run([*self._tmux, *arguments], check=True, capture_output=True, text=True).stdout

    def screen(self) -> list[str]:
        return self.tmux("capture-pane", "-p").splitlines()

    def history(self) -> str:
        return self.tmux("capture-pane", "-p", "-S", "-")

    def flags(self) -> str:
        return self.tmux("display-message", "-p", "alternate #{alternate_on} cursor #{cursor_flag}").strip()


@pytest.fixture
def pane(request: pytest.FixtureRequest) -> Iterator[Pane]:
    # A short path: that of a Unix socket may have 107 bytes only.
    with tempfile.TemporaryDirectory(prefix="hv-") as folder:
        pane = Pane(Path(folder) / "s", request.param)
        try:
            yield pane
        finally:
            pane.tmux("kill-server")


def shows_the_dashboard(pane: Pane, width: int, height: int) -> bool:
    """Every line is as rendered for that size; the one that names the log file, by its number of lines."""
    expected = render(leading(), width, height, kept=OffScreenOutput(3, "#")).plain.split("\n")
    marked = [at for at, line in enumerate(expected) if "3 log lines" in line]
    screen = pane.screen()
    if len(screen) != height or "3 log lines" not in screen[marked[0]]:
        return False
    del screen[marked[0]], expected[marked[0]]
    return screen == [line.rstrip() for line in expected]


def has_ended(pane: Pane, code: int) -> bool:
    # `brkint`/`echo` come from stty, the last thing that the shell prints.
    text = pane.history()
    return f"shell after, code {code}" in text and "iexten" in text


@pytest.mark.parametrize("pane", ["interrupt"], indirect=True)
def test_it_fits_survives_resizing_and_leaves_the_terminal_as_it_was(pane: Pane) -> None:
    for width, height in ((80, 24), (120, 40), (60, 20), (80, 24)):
        pane.tmux("resize-window", "-x", str(width), "-y", str(height))
        eventually(partial(shows_the_dashboard, pane, width, height), what=f"the dashboard at {width}x{height}")
    assert pane.flags() == "alternate 1 cursor 0"

    pane.tmux("send-keys", "C-c")
    eventually(lambda: has_ended(pane, 0), what="the end of the feed")
    assert pane.flags() == "alternate 0 cursor 1"
    assert_the_shell_is_back(pane)
    assert "left in order" in pane.history()


@pytest.mark.parametrize("pane", ["crash"], indirect=True)
def test_an_error_of_the_feed_leaves_the_terminal_as_it_was(pane: Pane) -> None:
    eventually(lambda: has_ended(pane, 1), what="the end of the feed")
    assert pane.flags() == "alternate 0 cursor 1"
    assert_the_shell_is_back(pane)
    assert "the feed crashed" in pane.history()


@pytest.mark.parametrize("pane", ["exit-now"], indirect=True)
def test_leaving_at_once_leaves_the_terminal_as_it_was(pane: Pane) -> None:
    eventually(lambda: shows_the_dashboard(pane, 80, 24), what="the dashboard")
    pane.tmux("send-keys", "C-c")
    eventually(lambda: has_ended(pane, 130), what="the end of the feed")
    assert pane.flags() == "alternate 0 cursor 1"
    assert_the_shell_is_back(pane)


def assert_the_shell_is_back(pane: Pane) -> None:
    """What stood there before stands there again, then what was kept, in order, each line once."""
    lines = pane.history().splitlines()
    assert lines[0] == "shell before"
    assert lines[1:4] == NOISE
    assert "LEADING" not in "\n".join(lines)
    assert " echo " in " ".join(lines)  # and not "-echo"
