"""Builds a dashboard's lines, with an exact width in terminal cells, and the view of one key. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from harvester.status import KeyStatus
from harvester_cli.dashboard.figures import counted, duration, one_line

_GAP = 2
# The characters of a dashboard, and their replacements, cell by cell, where only ASCII is shown.
_IN_ASCII = str.maketrans("▁▂▃▄▅▆▇█·░─…", "_:-=+*%#..-.")


def in_ascii(text: Text) -> Text:
    """A copy for a terminal that only shows ASCII."""
    drawn = text.copy()
    drawn.plain = text.plain.translate(_IN_ASCII)
    return drawn


def fit(text: Text, width: int) -> Text:
    """A copy of at most `width` cells; an ellipsis marks what was cut."""
    fitted = text.copy()
    if fitted.cell_len <= width:
        return fitted
    fitted.truncate(max(width, 0), overflow="ellipsis")
    return fitted


def ends(left: Text, rights: Sequence[Text], width: int) -> Text:
    """`left` at the left end and the first of `rights` that fits at the right end, or none of them."""
    for right in rights:
        blanks = width - left.cell_len - right.cell_len
        if blanks >= _GAP:
            return Text.assemble(left, " " * blanks, right)
    return fit(left, width)


def rule(title: str, width: int, *, notes: Sequence[str] = ()) -> Text:
    """A horizontal line, with a title near its left end and the first of `notes` that fits near its right end."""
    left = Text(f"── {title} ", style="bold")
    for note in notes:
        right = Text(f" {note} ──", style="dim")
        middle = width - left.cell_len - right.cell_len
        if middle >= _GAP:
            return Text.assemble(left, ("─" * middle, "dim"), right)
    rest = max(width - left.cell_len, 0)
    return fit(Text.assemble(left, ("─" * rest, "dim")), width)


@dataclass(frozen=True, slots=True)
class OneKey:
    """A record key and its last status, or in `trouble` the reason why there is none."""

    key: str
    told: KeyStatus | None = None
    trouble: str | None = None


def key_lines(view: OneKey) -> list[Text]:
    """A line for each piece of information, beginning with the key itself."""
    lines = [Text(one_line(view.key) or "(the empty key)", style="bold")]
    if view.told is not None:
        lines += [Text(one_line(line)) for line in key_words(view.told)]
    if view.trouble is not None:
        since = "" if view.told is None else f"no answer since {view.told.at:%H:%M:%S} UTC: "
        lines.append(Text(f"{since}{one_line(view.trouble)}", style="yellow"))
    elif view.told is None:
        lines.append(Text("asking ...", style="dim"))
    return lines


def key_words(status: KeyStatus) -> list[str]:
    """The same as plain sentences, without the key."""
    said = []
    if not status.leads:
        said.append("this harvester does not lead: only the database has information")
    else:
        under_way = counted(status.under_way, "record")
        said.append(f"shard {status.shard}: {under_way} under way, {status.waiting:,} waiting")
    if status.leads and status.retry_in_s is not None:
        rule = "holds its key" if status.held else "will be retried"
        when = f"in {duration(status.retry_in_s)}" if status.retry_in_s > 0 else "now"
        said.append(f"its first record failed and {rule}; next attempt {when}")
    if status.trouble is not None:
        said.append(f"the database did not answer: {status.trouble}")
    if status.rows is not None:
        oldest = ""
        if status.oldest_id is not None and status.oldest_age_s is not None:
            which = "one of them" if status.capped else "the oldest"
            oldest = f"; {which} is record {status.oldest_id}, {duration(status.oldest_age_s)} old"
        said.append(f"in the outbox: {status.rows:,}{'+' if status.capped else ''}{oldest}")
    if status.quarantined is not None:
        newest = f"; the last: {status.newest_error}" if status.newest_error is not None else ""
        said.append(f"in quarantine: {status.quarantined:,}{newest}")
    return said
