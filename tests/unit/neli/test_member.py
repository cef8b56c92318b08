"""What was asked and is not answered yet."""

from __future__ import annotations

from harvester.neli.member import Asked


def test_an_answer_counts_once_and_from_when_it_was_asked() -> None:
    asked = Asked(patience_s=5.0)
    first, second = asked.ask(100.0), asked.ask(101.0)
    assert (first, second, asked.number) == (1, 2, 2)
    assert [asked.take(second), asked.take(first)] == [101.0, 100.0]
    assert [asked.take(second), asked.take(3)] == [None, None]


def test_what_comes_too_late_proves_nothing() -> None:
    asked = Asked(patience_s=5.0)
    late, in_time = asked.ask(100.0), asked.ask(100.5)
    asked.ask(105.0)
    assert [asked.take(late), asked.take(in_time)] == [None, 100.5]


def test_numbers_go_on_when_all_is_forgotten() -> None:
    asked = Asked(patience_s=5.0)
    asked.ask(100.0)
    asked.clear()
    assert asked.take(1) is None
    assert asked.ask(100.0) == 2
