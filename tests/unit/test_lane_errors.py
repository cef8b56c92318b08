"""What an error of a transactional call means for the transaction."""

from __future__ import annotations

import pytest
from confluent_kafka import KafkaError

from harvester.delivery.lane import LaneSettings, Outcome, judge


def error(
    name: str = "_FAIL", *, fatal: bool = False, retriable: bool = False, requires_abort: bool = False
) -> KafkaError:
    return KafkaError(getattr(KafkaError, name), "reason", fatal, retriable, requires_abort)


@pytest.mark.parametrize(
    ("said", "outcome"),
    [
        (error("MSG_SIZE_TOO_LARGE", requires_abort=True), Outcome.REFUSED),
        (error("_TIMED_OUT", retriable=True), Outcome.AGAIN),
        (error("COORDINATOR_NOT_AVAILABLE", retriable=True), Outcome.AGAIN),
        (error("_TIMED_OUT", retriable=True, requires_abort=True), Outcome.REFUSED),
        (error("_STATE"), Outcome.UNCLEAR),
        (error("_FAIL"), Outcome.UNCLEAR),
    ],
)
def test_what_the_client_says_of_the_call_counts_and_not_its_code(said: KafkaError, outcome: Outcome) -> None:
    assert judge(said) is outcome


@pytest.mark.parametrize("retriable", [True, False])
@pytest.mark.parametrize("requires_abort", [True, False])
def test_a_producer_that_is_of_no_use_any_more_is_never_asked_again(retriable: bool, requires_abort: bool) -> None:
    said = error("_FENCED", fatal=True, retriable=retriable, requires_abort=requires_abort)
    assert judge(said) is Outcome.UNCLEAR


def test_an_error_without_flags_is_unclear() -> None:
    assert judge(KafkaError(KafkaError._FENCED)) is Outcome.UNCLEAR


def test_an_error_is_never_success() -> None:
    flags = [(a, b, c) for a in (True, False) for b in (True, False) for c in (True, False)]
    assert all(judge(error(fatal=a, retriable=b, requires_abort=c)) is not Outcome.DONE for a, b, c in flags)


def test_lanes_of_two_groups_have_nothing_in_common() -> None:
    names = {LaneSettings(group, "t", {}, {}).transactional_id(lane) for group in ("a", "b") for lane in (0, 1)}
    assert len(names) == 4
