"""Renders a verdict: a table of figures, the answer in one line, and examples of what is wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType

    from harvester.verify.check import VerifyReport
    from harvester.verify.sequences import Sequenced


def render(report: VerifyReport) -> RenderableType:
    """Pure: report in, rich renderable out."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    verdict, timing = report.verdict, report.timing
    table = Table(title="Verdict", title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(justify="left")
    table.add_column(justify="right")
    table.add_column(justify="left", style="dim")
    rows: tuple[tuple[str, int, bool, str], ...] = (
        ("inserted", verdict.inserted, False, "committed rows, by the side table"),
        ("delivered", verdict.delivered, False, "of these, found in Kafka"),
        ("lost", verdict.lost, True, "in neither Kafka, quarantine nor outbox"),
        ("duplicates", verdict.duplicates, False, "deliveries beyond a record's first"),
        ("order violations", verdict.order_violations, True, "records that come after a successor"),
        ("quarantined", verdict.quarantined, False, "set aside with their error"),
        ("pending", verdict.pending, False, "still in the outbox"),
        ("unexpected", verdict.unexpected, True, "records that were never committed"),
        ("scattered keys", verdict.scattered, True, "keys found in several partitions"),
    )
    for name, count, must_be_zero, meaning in rows:
        style = ("bold red" if count else "green") if must_be_zero else ""
        table.add_row(name, Text(f"{count:,}", style=style), meaning)
    if report.sequenced.records:
        for name, count, meaning in _sequences(report.sequenced):
            table.add_row(name, f"{count:,}", meaning)
    table.add_row("rate", _figure(timing.rate_per_s, "/s"), "from first to last record in Kafka")
    table.add_row("p50", _figure(timing.p50_ms, " ms"), "row inserted to timestamp in Kafka")
    table.add_row("p99", _figure(timing.p99_ms, " ms"), "")
    found = [*report.examples, *report.sequenced.examples]
    examples = [Text(f"  {example}", overflow="fold") for example in found]
    if examples:
        examples.insert(0, Text("Examples"))
    return Group(table, Text(answer(report)), *examples)


def _sequences(found: Sequenced) -> tuple[tuple[str, int, str], ...]:
    """What the headers tell by themselves; informational, since only the counts know what was committed."""
    return (
        ("repeated ids", found.repeats, "by the records' headers alone"),
        ("open numbers", found.open, "missing in the last sequence of a lane"),
        ("clashing numbers", found.clashes, "ids that share a number with another"),
    )


def answer(report: VerifyReport) -> str:
    """The verdict in one sentence."""
    verdict = report.verdict
    wrong = [
        f"{count:,} {name}"
        for count, name in (
            (verdict.lost, "lost"),
            (verdict.order_violations, "out of order"),
            (verdict.unexpected, "unexpected"),
            (verdict.scattered, "keys in several partitions"),
        )
        if count
    ]
    if wrong:
        return f"The guarantees do not hold: {', '.join(wrong)}."
    if not verdict.final:
        return f"Nothing is lost or out of order so far; {verdict.pending:,} records wait in the outbox."
    return "Nothing is lost or out of order."


def _figure(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:,.1f}{unit}"
