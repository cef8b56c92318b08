"""The map of the code: every package and module with the first line of its docstring, as Markdown.

`python -m scripts.modulemap` writes it to standard output. Sources are read, not imported.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = {"harvester": ROOT / "harvester", "harvester_cli": ROOT / "cli" / "harvester_cli"}
HEAD = """# The map of the code

Every module with the first line of its docstring, by package; made by `scripts/map`. How the parts work together:
[architecture.md](architecture.md). The way of a record begins in `harvester/relay/__init__.py`.
"""


def page() -> str:
    """The page."""
    return "\n".join([HEAD, *(line for base in SOURCES.values() for line in _package(base))])


def _package(folder: Path) -> Iterator[str]:
    """A package's section, then those of its packages."""
    modules = sorted(file for file in folder.glob("*.py") if file.name != "__init__.py" and not file.stem[0].isdigit())
    yield f"## {folder.relative_to(ROOT)}/\n"
    if line := _first_line(folder / "__init__.py"):
        yield f"{line}\n"
    if modules:
        yield "| module | |\n| --- | --- |"
        yield from (f"| `{file.stem}` | {_first_line(file)} |" for file in modules)
        yield ""
    for package in sorted(child for child in folder.iterdir() if (child / "__init__.py").is_file()):
        yield from _package(package)


def _first_line(file: Path) -> str:
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return text.split("\n", 1)[0].replace("|", "\\|")


if __name__ == "__main__":
    print(page())
