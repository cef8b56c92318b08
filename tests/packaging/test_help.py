"""`harvester --help` is quick because it loads next to nothing; `scripts/help-time` measures it."""

from __future__ import annotations

import subprocess
import sys

import pytest
from harvester_cli.main import app
from typer.main import get_command

from scripts import manpage
from tests.support.cli import run_cli

# Each takes longer to load than all the rest of the help together, or leads to what does.
HEAVY = {"asyncio", "confluent_kafka", "harvester.config", "psycopg", "pydantic", "rich", "yaml"}
TYPERS = {"pydantic"}  # of a subcommand Typer reads its own two options for completion first, by way of pydantic
COMMANDS = sorted(get_command(app).commands)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("arguments", "excused"),
    [(["--help"], set()), (["--version"], set()), (["start", "--help"], TYPERS), (["dead", "--help"], TYPERS)],
)
def test_help_loads_nothing_heavy(arguments: list[str], excused: set[str]) -> None:
    program = f"""if True:
        import sys
        sys.argv = ["harvester", *{arguments!r}]
        from harvester_cli.main import main
        try:
            main()
        except SystemExit as end:
            assert not end.code, end.code
        print("loaded:", *sorted({HEAVY - excused!r} & set(sys.modules)))
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1].split() == ["loaded:"]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_says_what_it_does(command: str) -> None:
    found = get_command(app).commands[command]  # type: ignore[attr-defined]
    assert found.help or found.hidden, f"harvester {command} has no help"


def test_an_option_that_does_not_exist_is_one_message() -> None:
    done = run_cli("start", "--no-such-option", check=False)
    assert done.returncode == 2
    assert "No such option: --no-such-option" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_manual_page_is_that_of_the_commands() -> None:
    written = (manpage.ROOT / "docs" / "man" / "harvester.1").read_text(encoding="utf-8")
    assert written == manpage.page(), "run scripts/man"
    for command in COMMANDS:
        assert f".SS harvester {command}".replace("-", "\\-") in written
