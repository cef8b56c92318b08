"""Of many like lines one is said when they begin, one a minute, and one when they end."""

from __future__ import annotations

import pytest

from harvester.telemetry.repeats import Ended, Repeats, client_form, form_of


def test_an_outage_is_one_line_then_one_a_minute_with_the_count_and_one_at_its_end() -> None:
    repeats = Repeats()
    said = [(tick, repeats.report("database", "refused", tick / 10)) for tick in range(1_250)]  # 125 s
    assert [each for each in said if each[1] is not None] == [(0, 0), (600, 599), (1_200, 599)]
    assert repeats.end("database", 125.0) == Ended("database", 1_250, 125.0)
    assert repeats.end("database", 125.0) is None
    assert repeats.due(200.0) == []
    assert repeats.report("database", "refused", 201.0) == 0  # another outage


def test_another_cause_is_said_at_once_up_to_a_bound() -> None:
    repeats = Repeats()
    causes = [f"cause {letter}" for letter in "abcdefghij"]
    said = [repeats.report("database", cause, 0.0) for cause in [*causes, *causes]]
    assert said == [0] * 6 + [None] * 14


def test_kinds_do_not_hide_each_other() -> None:
    repeats = Repeats()
    assert [repeats.report(kind, "x", 0.0) for kind in ("database", "group", "shard", "group")] == [0, 0, 0, None]


def test_what_comes_and_goes_has_one_end() -> None:
    repeats = Repeats()
    said = 0
    for tick in range(30):
        said += repeats.report("shard", "x", float(tick)) is not None
        said += repeats.end("shard", tick + 0.5) is not None
        said += len(repeats.due(tick + 0.5))
    assert said == 2  # it began, and what was taken for its end
    assert repeats.due(33.0) == []
    assert repeats.due(35.0) == [Ended("shard", 30, 29.5)]
    assert repeats.due(36.0) == []


def test_what_nobody_ends_is_over_after_a_silent_minute() -> None:
    repeats = Repeats()
    for now in (0.0, 1.0, 2.0):
        repeats.report("client", "x", now, by_silence=True)
    repeats.report("once", "x", 2.0, by_silence=True)
    repeats.report("database", "x", 2.0)
    repeats.report("database", "x", 2.0)
    assert repeats.due(61.0) == []
    assert repeats.due(62.0) == [Ended("client", 3, 2.0)]  # one line that stayed alone needs no end
    assert repeats.due(10_000.0) == []
    assert repeats.end("database", 10_000.0) is not None


def test_what_is_gone_has_not_recovered() -> None:
    repeats = Repeats()
    repeats.report("shard", "x", 0.0)
    repeats.forget("shard", 1.0)
    assert repeats.end("shard", 2.0) is None
    assert repeats.due(100.0) == []


@pytest.mark.parametrize(
    ("line", "form"),
    [
        (
            "FAIL [rdkafka#producer-7] [thrd:127.0.0.1:9092/1]: 127.0.0.1:9092/1: Connect to ipv4#127.0.0.1:9092 "
            "failed: Connection refused (after 0ms in state CONNECT, 12 identical error(s) suppressed)",
            "FAIL Connection refused",
        ),
        ("ERROR [rdkafka#producer-7] [thrd:app]: rdkafka#producer-7: 2/2 brokers are down", "ERROR / brokers are down"),
        ("joined group g, elected", None),
    ],
)
def test_a_line_of_the_client_is_known_by_facility_and_cause(line: str, form: str | None) -> None:
    assert client_form(line) == form


def test_a_form_has_no_figures() -> None:
    first, second = (form_of(f"record {number} failed (attempts {number}): timed out") for number in (7, 12))
    assert first == second
