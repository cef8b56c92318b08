"""Commands that take their time say what they do, to people only."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import threading

import pytest

from tests.support.cli import COMMAND, cli_environment, run_cli

COLOUR = re.compile(r"\x1b\[[0-9;]*3[0-9][;m]")


def on_a_terminal(*args: str, **env: str) -> str:
    """What a command writes to standard error where that is a terminal."""
    ours, theirs = pty.openpty()
    seen = bytearray()

    def read() -> None:
        try:
            while part := os.read(ours, 4096):
                seen.extend(part)
        except OSError:  # EIO: the other end has gone
            pass

    reader = threading.Thread(target=read)
    reader.start()
    environment = {**cli_environment(), "TERM": "xterm-256color", **env}
    if not environment["NO_COLOR"]:
        del environment["NO_COLOR"]
    try:
        done = subprocess.run(
            [*COMMAND, *args], env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=theirs,
            text=True, timeout=120, check=False,
        )  # fmt: skip
    finally:
        os.close(theirs)
        reader.join(30)
        os.close(ours)
    assert done.returncode == 0, seen.decode()
    return seen.decode()


@pytest.mark.parametrize(
    ("command", "said"),
    [(["init"], "setting up"), (["dead", "redrive", "--all", "--yes"], "checking whether the order")],
)
def test_a_terminal_shows_what_is_done(database: str, command: list[str], said: str) -> None:
    where = ["--set", f"data_source={database}"]
    coloured = on_a_terminal(*command, *where, NO_COLOR="")
    assert said in coloured
    assert COLOUR.search(coloured)
    plain = on_a_terminal(*command, *where, NO_COLOR="1")
    assert said in plain
    assert not COLOUR.search(plain)
    assert run_cli(*command, *where).stderr == ""
