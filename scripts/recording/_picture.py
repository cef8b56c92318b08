"""Saves screens as text, and as SVG drawn by rich."""

from __future__ import annotations

import io
import re
from pathlib import Path

from rich.console import Console
from rich.text import Text

# The picture is drawn with the reader's own monospaced font: it fetches nothing.
_FONT_FACE = re.compile(r"\s*@font-face \{.*?\}", re.DOTALL)


def save(screen: Text, folder: Path, name: str, title: str, width: int) -> None:
    """Writes `name`.txt and `name`.svg."""
    lines = [line.rstrip() for line in screen.plain.split("\n")]
    (folder / f"{name}.txt").write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
    (folder / f"{name}.svg").write_text(svg(screen, title, width), encoding="utf-8")


def svg(screen: Text, title: str, width: int) -> str:
    """A window with this title around the screen."""
    console = Console(
        record=True, width=width, file=io.StringIO(), force_terminal=True, color_system="truecolor", no_color=False
    )
    shown = screen.copy()
    shown.rstrip()
    console.print(shown, no_wrap=True, overflow="crop", crop=True)
    drawn = console.export_svg(title=title, unique_id="screen")
    return "\n".join(line.rstrip() for line in _FONT_FACE.sub("", drawn).splitlines()) + "\n"
