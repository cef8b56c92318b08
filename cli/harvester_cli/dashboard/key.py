"""One key, as the dashboard and `harvester watch --key` tell of it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from rich.text import Text

from harvester.status import KeyStatus
from harvester_cli.dashboard.figures import duration, one_line


@dataclass(frozen=True, slots=True)
class OneKey:
    """What is known of this key: `told` last, or in `trouble` why that cannot be had."""

    key: str
    told: KeyStatus | None = None
    trouble: str | None = None


def key_lines(view: OneKey) -> list[Text]:
    """A line for each thing worth knowing, the key itself first."""
    lines = [Text(one_line(view.key) or "(the empty key)", style="bold")]
    if view.told is not None:
        lines += [Text(one_line(line)) for line in key_words(view.told)]
    if view.trouble is not None:
        lines.append(Text(one_line(view.trouble), style="yellow"))
    elif view.told is None:
        lines.append(Text("asking ...", style="dim"))
    return lines


def key_words(status: KeyStatus) -> list[str]:
    """The same as plain sentences, without the key."""
    said = []
    if not status.leads:
        said.append("this harvester does not lead: only the database tells")
    else:
        said.append(f"shard {status.shard}: {_records(status.under_way)} under way, {status.waiting:,} waiting")
    if status.leads and status.retry_in_s is not None:
        rule = "holds its key" if status.held else "is tried again"
        when = f"in {duration(status.retry_in_s)}" if status.retry_in_s > 0 else "now"
        said.append(f"its first record failed and {rule}; next attempt {when}")
    if status.trouble is not None:
        said.append(f"the database does not tell: {status.trouble}")
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


def _records(count: int) -> str:
    return "1 record" if count == 1 else f"{count:,} records"
