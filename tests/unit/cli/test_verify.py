"""The verdict as people read it."""

from __future__ import annotations

from dataclasses import replace
from uuid import UUID

import pytest
from harvester_cli.verify import answer, render
from rich.console import Console

from harvester.origin import Origin
from harvester.verify.check import VerifyReport
from harvester.verify.reader import LogTimes
from harvester.verify.sequences import Sequences
from harvester.verify.verdict import judge


def report(
    log: list[tuple[str, int]], *, pending: set[int] | None = None, examples: tuple[str, ...] = ()
) -> VerifyReport:
    verdict = judge({"a": 1200}, log, pending={"a": pending or set()})
    return VerifyReport(verdict, LogTimes(rate_per_s=1234.56, p50_ms=None, p99_ms=98.7), ("t",), examples)


def drawn(view: VerifyReport) -> list[str]:
    console = Console(width=80, no_color=True, force_terminal=False)
    with console.capture() as capture:
        console.print(render(view))
    return [line.rstrip() for line in capture.get().splitlines()]


def test_a_good_verdict_fits_a_small_terminal() -> None:
    lines = drawn(report([("a", seq) for seq in range(1, 1201)]))

    assert lines[0] == "Verdict"
    assert lines[1].split()[:2] == ["inserted", "1,200"]
    assert [line.split()[:2] for line in lines if line.startswith(("rate", "p50"))] == [
        ["rate", "1,234.6/s"],
        ["p50", "-"],
    ]
    assert lines[-1] == "Nothing is lost or out of order."
    assert max(map(len, lines)) <= 80
    assert len(lines) == 14


def test_sequences_are_shown_where_there_are_any() -> None:
    sequences = Sequences()
    for number in (1, 3, 3):
        sequences.add(Origin(UUID(int=1), number, 1, 0, 1, number, 0), number)
    view = replace(report([("a", seq) for seq in range(1, 1201)]), sequenced=sequences.judge())

    lines = drawn(view)

    assert [line.split()[:3] for line in lines if "number" in line[:20] or "ids" in line[:20]] == [
        ["repeated", "ids", "1"],
        ["open", "numbers", "1"],
        ["clashing", "numbers", "0"],
    ]
    assert answer(view) == "Nothing is lost or out of order."
    assert " ".join(lines[-2:]).endswith("number 2 under way or lost")
    assert "Examples" not in lines
    assert any(line.startswith("From the headers alone") for line in lines)
    assert view.details()["sequences"] == {
        "streams": 1,
        "records": 3,
        "repeats": 1,
        "clashes": 0,
        "given_up": 0,
        "handed_over": 0,
        "open": 1,
        "examples": [f"term 1, lane 0, producer 1 of {UUID(int=1)}: number 2 under way or lost"],
    }


def test_what_is_wrong_is_said_and_shown() -> None:
    view = report([("a", 2), ("a", 1)], examples=("a #1: delivered after a successor (#2) at t[0]@1",))

    lines = drawn(view)

    assert answer(view) == "The guarantees do not hold: 1,198 lost, 1 out of order."
    assert lines[-3:] == [answer(view), "Examples", "  a #1: delivered after a successor (#2) at t[0]@1"]


@pytest.mark.parametrize(
    ("missing", "expected"), [(set(), "Nothing is lost or out of order."), ({7}, "so far; 1 records wait")]
)
def test_pending_records_make_it_preliminary(missing: set[int], expected: str) -> None:
    log = [("a", seq) for seq in range(1, 1201) if seq not in missing]

    assert expected in answer(report(log, pending=missing))


def test_the_summary_has_the_documented_keys_in_order() -> None:
    assert list(report([]).summary()) == [
        "inserted",
        "delivered",
        "lost",
        "duplicates",
        "order_violations",
        "quarantined",
        "rate_per_s",
        "p50_ms",
        "p99_ms",
    ]
