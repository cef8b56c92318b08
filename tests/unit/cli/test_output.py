"""Tables for people: in ASCII where the locale is C, and unwrapped where there is no terminal."""

from __future__ import annotations

import subprocess
import sys

from tests.support.cli import cli_environment

_PROGRAM = """if True:
    from rich.table import Table
    from harvester_cli.output import print_rich
    table = Table("name", "value")
    table.add_row("long", " ".join(["word"] * 100))
    print_rich(table)
"""


def printed(**environment: str) -> str:
    env = {name: value for name, value in cli_environment().items() if not name.startswith(("LC_", "LANG"))}
    done = subprocess.run([sys.executable, "-c", _PROGRAM], env={**env, **environment}, capture_output=True, check=True)
    return done.stdout.decode()


def test_in_the_locale_c_tables_are_drawn_in_ascii() -> None:
    assert printed(LC_ALL="C").isascii()
    assert printed(LC_ALL="POSIX", LANG="en_US.UTF-8").isascii()
    assert not printed(LC_ALL="C.UTF-8").isascii()


def test_a_piped_table_does_not_wrap() -> None:
    said = printed(LC_ALL="C", COLUMNS="40")
    assert sum("word" in line for line in said.splitlines()) == 1
