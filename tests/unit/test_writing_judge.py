"""The judge of the fault tests' load: forged logs make it complain, a true one does not."""

from __future__ import annotations

import pytest

from tests.support.writing import Findings, Row, judge


def found(*numbers: int, key: str = "a") -> dict[str, list[Row]]:
    return {key: [Row(number, 1, number * 10) for number in numbers]}


def test_a_true_log_with_repeats() -> None:
    assert judge({"a": 4}, found(1, 2, 2, 3, 4, 4, 4)) == Findings([], [], [], 3)


@pytest.mark.parametrize(
    ("numbers", "kind"),
    [
        ((1, 2, 4), "lost"),
        ((1, 2, 3), "lost"),
        ((), "lost"),
        ((1, 3, 2, 4), "order"),
        ((1, 2, 3, 4, 3), "order"),
        ((1, 2, 1, 2, 3, 4), "order"),
        ((1, 2, 3, 4, 5), "strange"),
    ],
)
def test_forged_logs(numbers: tuple[int, ...], kind: str) -> None:
    assert getattr(judge({"a": 4}, found(*numbers)), kind)


def test_a_number_from_two_rows_and_a_key_from_nowhere_are_strange() -> None:
    rolled_back = {"a": [Row(1, 1, 10), Row(1, 1, 11)]}
    assert judge({"a": 1}, rolled_back).strange
    assert judge({}, found(1)).strange


def test_quarantine_excuses_as_many_as_stand_in_it() -> None:
    assert judge({"a": 4}, found(1, 2, 4), quarantined=1) == Findings([], [], [], 0)
    assert judge({"a": 4}, found(1, 4), quarantined=1).lost
