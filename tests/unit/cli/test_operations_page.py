"""docs/operations.md says what the code and the unit do."""

from __future__ import annotations

import io
import re
from pathlib import Path

from harvester_cli.dashboard.live import status_line
from harvester_cli.dashboard.render import render
from harvester_cli.dashboard.terminal import REPLAY_BYTES
from rich.console import Console

from harvester.errors import ExitCode
from tests.support.statuses import leading

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
UNIT = (ROOT / "cli" / "harvester_cli" / "units" / "harvester.service").read_text(encoding="utf-8")
ROW = re.compile(r"^\| (\d+) \| ([A-Z_]+) \| [^|]+ \| [^|]+ \| (yes|no) \|$", re.MULTILINE)


def test_the_table_lists_every_exit_code_once() -> None:
    assert [(int(code), name) for code, name, _ in ROW.findall(PAGE)] == [(int(code), code.name) for code in ExitCode]


def test_the_table_says_which_codes_the_unit_restarts() -> None:
    prevented = re.search(r"^RestartPreventExitStatus=(.*)$", UNIT, re.MULTILINE)
    assert prevented is not None
    # A stop that was asked for is no failure: 0 by itself, 130 because only a second signal during a stop causes it.
    final = {int(code) for code in prevented[1].split()} | {ExitCode.OK, ExitCode.FORCED}
    assert {int(code) for code, _, restarted in ROW.findall(PAGE) if restarted == "no"} == final


def test_settings_of_the_unit_are_quoted_as_they_are() -> None:
    rows = PAGE.partition("| setting | reason |")[2].partition("\n\n")[0]
    named = re.findall(r"`([A-Z]\w+=[^`]+)`", rows)
    assert len(named) >= 9
    for setting in named:
        assert f"\n{setting}\n" in UNIT


def test_the_examples_are_what_is_shown() -> None:
    out = io.StringIO()
    Console(file=out, width=80, height=24, color_system=None).print(render(leading(), 80, 24))
    shown = "\n".join(line.rstrip() for line in out.getvalue().splitlines()[:11])
    assert f"```\n{shown}\n```" in PAGE
    assert f"```\n{status_line(leading())}\n```" in PAGE


def test_the_size_of_what_is_printed_again() -> None:
    assert f"longer than {REPLAY_BYTES >> 10} KiB" in PAGE
