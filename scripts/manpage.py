"""The manual page, made from the commands: `python -m scripts.manpage` writes it to standard output (man(7)).

It contains the commands' own help texts; the exit codes come from docs/operations.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harvester_cli.main import app
from typer.main import get_command

ROOT = Path(__file__).parents[1]
_EXIT_CODE = re.compile(r"^\| (\d+) \| ([A-Z_]+) \| ([^|]+) \|", re.MULTILINE)
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_ENVIRONMENT = (
    ("HARVESTER_CONFIG", "The configuration file, where \\-\\-config does not name one."),
    ("HARVESTER_STACK", "The directory of the embedded servers."),
    ("NO_COLOR", "Set to anything: no colours."),
)


def page() -> str:
    """The whole page."""
    root = get_command(app)
    context = _context(root, "harvester", None)
    return "\n".join(
        [
            '.\\" Made by scripts/man from the commands: change those, not this.',
            '.TH HARVESTER 1 "" "" "User Commands"',
            ".SH NAME",
            "harvester \\- moves outbox rows from PostgreSQL to Kafka",
            ".SH SYNOPSIS",
            ".B harvester",
            "[\\fIOPTIONS\\fR] \\fICOMMAND\\fR [\\fIARGS\\fR]...",
            ".SH DESCRIPTION",
            *_paragraphs(root.help or ""),
            ".SH OPTIONS",
            *_options(root, context),
            ".SH COMMANDS",
            *_commands(root, context),
            ".SH EXIT STATUS",
            *_exit_codes(),
            ".SH ENVIRONMENT",
            *(line for name, text in _ENVIRONMENT for line in (".TP", f".B {name}", text)),
            ".SH FILES",
            ".TP",
            ".I ./harvester.toml",
            "The configuration, where neither an option nor the environment names one.",
            ".SH SEE ALSO",
            ".BR psql (1),",
            ".BR systemctl (1)",
            "",
        ]
    )


def _context(command: Any, name: str, parent: Any) -> Any:
    # A fixed width: the page must not depend on the terminal it is made in.
    return command.context_class(command, info_name=name, parent=parent, terminal_width=80)


def _commands(group: Any, context: Any) -> Iterator[str]:
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        inner = _context(command, name, context)
        if command.hidden:
            continue
        if hasattr(command, "list_commands"):
            yield f".SS {_text(inner.command_path)}"
            yield from _paragraphs(command.help or "")
            yield from _commands(command, inner)
            continue
        usage = " ".join(command.collect_usage_pieces(inner))
        yield f".SS {_text(f'{inner.command_path} {usage}')}"
        yield from _paragraphs(command.help or "")
        yield from _options(command, inner)


def _options(command: Any, context: Any) -> Iterator[str]:
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is not None and "--help" not in parameter.opts:
            yield ".TP"
            yield f".B {_text(record[0])}"
            yield _text(" ".join(record[1].split())) or "\\&"


def _exit_codes() -> Iterator[str]:
    for code, _name, meaning in _EXIT_CODE.findall((ROOT / "docs/operations.md").read_text(encoding="utf-8")):
        yield ".TP"
        yield f".B {code}"
        yield _text(_LINK.sub(r"\1", meaning).replace("`", ""))


def _paragraphs(text: str) -> Iterator[str]:
    """Paragraphs of a docstring; indented ones are examples and keep their lines."""
    for number, block in enumerate(re.split(r"\n\s*\n", text.strip("\n"))):
        if number:
            yield ".PP"
        lines = block.replace("\b\n", "").splitlines()
        if lines and all(line.startswith("    ") for line in lines):
            yield from (".RS", ".nf", *(_text(line[4:]) for line in lines), ".fi", ".RE")
        elif lines:
            yield _text(" ".join(line.strip() for line in lines))


def _text(text: str) -> str:
    """The text escaped so that troff shows it unchanged, with hyphens that can be copied."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{escaped}" if escaped[:1] in (".", "'") else escaped


if __name__ == "__main__":
    print(page(), end="")
