"""A mistake in the command line: text for people, one line of JSON for the journal of a service."""

from __future__ import annotations

import json

import pytest

from tests.support.cli import run_cli

UNDER_SYSTEMD = {"NOTIFY_SOCKET": "/nonexistent/notify"}
MISTAKES = [
    (("start", "--nonsense"), "No such option: --nonsense", "start --help"),
    (("strat",), "No such command 'strat'", " --help"),
    (("start", "--shards", "many"), "Invalid value for '--shards'", "start --help"),
]


@pytest.mark.parametrize(("arguments", "message", "hint"), MISTAKES)
def test_the_journal_gets_one_line(arguments: tuple[str, ...], message: str, hint: str) -> None:
    done = run_cli(*arguments, env=UNDER_SYSTEMD, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    said = json.loads(line)
    assert said["level"] == "error"
    assert message in said["message"]
    assert hint in said["hint"]


def test_people_get_the_usage() -> None:
    done = run_cli("start", "--nonsense", check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("Usage: ")


def test_what_is_no_mistake_ends_as_before() -> None:
    for arguments in (("--version",), ("start", "--help")):
        assert run_cli(*arguments, env=UNDER_SYSTEMD).stdout == run_cli(*arguments).stdout
