"""Single lines of an exact width, counted in terminal cells (a wide character takes two). Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

_GAP = 2


def fit(text: Text, width: int, *, ascii_only: bool = False) -> Text:
    """A copy that takes `width` cells at most; where something had to go, an ellipsis says so."""
    fitted = text.copy()
    if fitted.cell_len <= width:
        return fitted
    if ascii_only and width > 2:
        fitted.truncate(width - 2)
        return fitted.append("..")
    fitted.truncate(max(width, 0), overflow="crop" if ascii_only else "ellipsis")
    return fitted


def ends(left: Text, rights: Sequence[Text], width: int, *, ascii_only: bool = False) -> Text:
    """`left` at the left end and the first of `rights` that fits beside it at the right one; else none of them."""
    for right in rights:
        blanks = width - left.cell_len - right.cell_len
        if blanks >= _GAP:
            return Text.assemble(left, " " * blanks, right)
    return fit(left, width, ascii_only=ascii_only)


def rule(title: str, width: int, *, notes: Sequence[str] = (), ascii_only: bool = False) -> Text:
    """A line across, with a title near its left end and the first of `notes` that fits near its right one."""
    dash = "-" if ascii_only else "─"
    left = Text(f"{dash * 2} {title} ", style="bold")
    for note in notes:
        right = Text(f" {note} {dash * 2}", style="dim")
        middle = width - left.cell_len - right.cell_len
        if middle >= _GAP:
            return Text.assemble(left, (dash * middle, "dim"), right)
    rest = max(width - left.cell_len, 0)
    return fit(Text.assemble(left, (dash * rest, "dim")), width, ascii_only=ascii_only)
