"""What a failed delivery means."""

from __future__ import annotations

import pytest
from confluent_kafka import KafkaError
from hypothesis import given
from hypothesis import strategies as st

from harvester.delivery import retries
from harvester.delivery.retries import (
    FATE_UNKNOWN,
    INNOCENT,
    MAYBE_LATER,
    NEVER,
    Failure,
    RetryVerdict,
    backoff_s,
    judge,
)

NAMES = {
    KafkaError(code).name()
    for name, code in vars(KafkaError).items()
    if isinstance(code, int) and name.upper() == name
}  # fmt: skip


def test_every_name_is_one_that_the_client_uses() -> None:
    assert NEVER | MAYBE_LATER | FATE_UNKNOWN | INNOCENT <= NAMES


def test_every_name_is_in_one_table_only() -> None:
    assert not (NEVER & MAYBE_LATER) | (NEVER & FATE_UNKNOWN) | (MAYBE_LATER & FATE_UNKNOWN)


@pytest.mark.parametrize(
    "name",
    ["_MSG_TIMED_OUT", "_TRANSPORT", "_ALL_BROKERS_DOWN", "_TIMED_OUT", "_QUEUE_FULL", "NOT_LEADER_FOR_PARTITION",
     "LEADER_NOT_AVAILABLE", "NOT_ENOUGH_REPLICAS", "NOT_ENOUGH_REPLICAS_AFTER_APPEND", "REQUEST_TIMED_OUT",
     "NETWORK_EXCEPTION", "BROKER_NOT_AVAILABLE", "COORDINATOR_NOT_AVAILABLE", "_SSL", "_AUTHENTICATION", "_DESTROY"],
)  # fmt: skip
@pytest.mark.parametrize("attempts", [0, 1, 10**6])
def test_an_outage_is_retried_for_ever(name: str, attempts: int) -> None:
    assert name in NAMES
    assert judge(Failure(name), attempts, 5) is RetryVerdict.RETRY
    assert not retries.burns_attempt(Failure(name))


@pytest.mark.parametrize("name", sorted(NEVER))
def test_a_refusal_by_the_client_is_final_at_once(name: str) -> None:
    assert judge(Failure(name, local=True), 1, 5) is RetryVerdict.QUARANTINE


@pytest.mark.parametrize("name", sorted(NEVER | MAYBE_LATER))
def test_a_refusal_by_the_broker_is_final_after_all_attempts(name: str) -> None:
    assert retries.burns_attempt(Failure(name))
    assert [judge(Failure(name), n, 3) for n in (1, 2, 3, 4)] == [
        RetryVerdict.RETRY, RetryVerdict.RETRY, RetryVerdict.QUARANTINE, RetryVerdict.QUARANTINE,
    ]  # fmt: skip


@pytest.mark.parametrize("name", sorted(FATE_UNKNOWN))
def test_a_lost_producer_is_fatal(name: str) -> None:
    assert judge(Failure(name), 1, 5) is RetryVerdict.FATAL


@given(st.sampled_from(sorted(NAMES)), st.integers(0, 10), st.integers(1, 10))
def test_whatever_is_fatal_is_fatal(name: str, attempts: int, max_attempts: int) -> None:
    assert judge(Failure(name, fatal=True), attempts, max_attempts) is RetryVerdict.FATAL


@given(st.integers(0, 10**6), st.floats(0, 10), st.floats(0, 100), st.floats(0, 1, exclude_max=True))
def test_the_wait_is_bounded(failures: int, first_s: float, longest_s: float, jitter: float) -> None:
    wait_s = backoff_s(failures, first_s, longest_s, jitter)
    assert min(first_s, longest_s) / 2 <= wait_s <= longest_s


@given(st.integers(1, 100), st.floats(0.001, 1), st.floats(1, 100))
def test_the_wait_never_shrinks(failures: int, first_s: float, longest_s: float) -> None:
    assert backoff_s(failures + 1, first_s, longest_s, 0.5) >= backoff_s(failures, first_s, longest_s, 0.5)


def test_the_wait_doubles() -> None:
    assert [backoff_s(n, 0.1, 0.5, 1.0) for n in (1, 2, 3, 4)] == pytest.approx([0.1, 0.2, 0.4, 0.5])
