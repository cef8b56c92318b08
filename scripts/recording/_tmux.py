"""Terminals of 100×30 in a separate tmux server: types commands, reads screens and exit codes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from rich.text import Text

WIDTH, HEIGHT = 100, 30
_LOOK_S = 0.1
_SETTLES_S = 20.0  # what a command wrote before it ended is on the screen by then
# Written before each prompt, the first included: how the command ended, in a file of this terminal.
_PROMPT_COMMAND = 'echo $? >>"$RECORDING_CODES/$TMUX_PANE"'
_UNWANTED = ("TMUX", "TMUX_PANE", "NO_COLOR", "COLUMNS", "LINES", "PS1", "BASH_ENV", "ENV", "NOTIFY_SOCKET")


class Unseen(Exception):
    """Something did not appear or end in time, or ended differently; the message shows the screen."""


class Tmux:
    """The server. `folder`: a short path, since that of a Unix socket may have 107 bytes only."""

    def __init__(self, folder: Path, extra: Mapping[str, str], within_s: float) -> None:
        """`extra`: further environment of the shells; `within_s`: the timeout of every wait."""
        self.within_s = within_s
        self.codes = folder / "codes"
        self.codes.mkdir()
        self._command = ["tmux", "-u", "-f", os.devnull, "-S", str(folder / "tmux")]
        kept = {name: value for name, value in os.environ.items() if name not in _UNWANTED}
        self._environment = {
            **kept,
            "PATH": f"{Path(sys.executable).parent}:{kept.get('PATH', os.defpath)}",
            "LC_ALL": "C.UTF-8",
            "PS1": "$ ",
            "PROMPT_COMMAND": _PROMPT_COMMAND,
            "RECORDING_CODES": str(self.codes),
            "HISTFILE": "",
            **extra,
        }
        # A session that stays, whatever becomes of the windows; its shell is not used.
        self.call("new-session", "-d", "-x", str(WIDTH), "-y", str(HEIGHT), "sh", "-c", "exec cat")
        self.call("set-option", "-g", "default-terminal", "screen-256color")
        self.call("set-option", "-g", "status", "off")

    def call(self, *arguments: str) -> str:
        """Runs a tmux command; returns its output."""
        done = subprocess.run(
            [*self._command, *arguments], env=self._environment, check=False, capture_output=True, text=True
        )
        if done.returncode:
            raise Unseen(f"tmux {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    def window(self) -> Window:
        """Opens a terminal with a shell, and waits for its prompt."""
        shell = ("bash", "--norc", "--noprofile", "-i")
        pane = self.call("new-window", "-d", "-P", "-F", "#{pane_id}", *shell).strip()
        opened = Window(self, pane)
        opened.wait_for_prompt(0)
        return opened

    def close(self) -> None:
        """Ends the server; programs still running in a window get SIGHUP."""
        with suppress(Unseen):  # it is gone already
            self.call("kill-server")


class Window:
    """One terminal."""

    def __init__(self, tmux: Tmux, pane: str) -> None:
        self._tmux, self._pane = tmux, pane
        self._typed_at = 0  # how many prompts there were

    # -- typing

    def type(self, command: str) -> int:
        """Types a line and Enter; returns the number of prompts before, for `wait_for_prompt`."""
        self._typed_at = before = len(self._prompts())
        self._tmux.call("send-keys", "-t", self._pane, "-l", command)
        self._tmux.call("send-keys", "-t", self._pane, "Enter")
        return before

    def press(self, key: str) -> None:
        """Presses a key, given by its tmux name."""
        self._tmux.call("send-keys", "-t", self._pane, key)

    # -- seeing

    def screen(self) -> Text:
        """The current screen, including colours."""
        return Text.from_ansi(self._tmux.call("capture-pane", "-e", "-p", "-t", self._pane))

    def see(self, *patterns: str) -> Text:
        """Waits for a screen with all of these regular expressions (`^` and `$` match at lines), and returns it."""
        deadline = time.monotonic() + self._tmux.within_s
        while True:
            ended = len(self._prompts()) > self._typed_at
            if ended:
                deadline = min(deadline, time.monotonic() + _SETTLES_S)
            screen = self.screen()
            missing = [each for each in patterns if not re.search(each, screen.plain, re.MULTILINE)]
            if not missing:
                return screen
            if time.monotonic() > deadline:
                wanted = " and ".join(map(repr, missing))
                how = "and the command has ended" if ended else f"within {self._tmux.within_s:g} s"
                raise Unseen(f"{wanted} not seen {how}:\n{screen.plain.rstrip()}")
            time.sleep(_LOOK_S)

    def is_alternate(self) -> bool:
        """Whether a full-screen program has the terminal."""
        return self._tmux.call("display-message", "-p", "-t", self._pane, "#{alternate_on}").strip() == "1"

    # -- how commands end

    def wait_for_prompt(self, before: int, within_s: float | None = None) -> int:
        """Waits for more prompts than `before`; returns the exit code of the last command."""
        within_s = self._tmux.within_s if within_s is None else within_s
        deadline = time.monotonic() + within_s
        while len(codes := self._prompts()) <= before:
            if time.monotonic() > deadline:
                raise Unseen(f"no prompt within {within_s:g} s:\n{self.screen().plain}")
            time.sleep(_LOOK_S)
        return codes[-1]

    def _prompts(self) -> list[int]:
        """The exit code at each prompt."""
        try:
            written = (self._tmux.codes / self._pane).read_text()
        except FileNotFoundError:
            return []
        return [int(line) for line in written.splitlines(keepends=True) if line.endswith("\n")]
