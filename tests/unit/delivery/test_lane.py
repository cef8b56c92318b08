"""What an error of a transactional call means for the transaction."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError
from hypothesis import given
from hypothesis import strategies as st

from harvester.delivery.lane import (
    NOT_ALLOWED,
    Lane,
    Lanes,
    LaneSettings,
    TransactionOutcome,
    Witness,
    answer_s,
    earliest_resend_s,
    is_clear,
    judge,
)
from harvester.delivery.progress import EncodedProgress
from harvester.delivery.progress_topic import durable


def error(
    name: str = "_FAIL", *, fatal: bool = False, retriable: bool = False, requires_abort: bool = False
) -> KafkaError:
    return KafkaError(getattr(KafkaError, name), "reason", fatal, retriable, requires_abort)


@pytest.mark.parametrize(
    ("said", "outcome"),
    [
        (error("MSG_SIZE_TOO_LARGE", requires_abort=True), TransactionOutcome.REFUSED),
        (error("_TIMED_OUT", retriable=True), TransactionOutcome.AGAIN),
        (error("COORDINATOR_NOT_AVAILABLE", retriable=True), TransactionOutcome.AGAIN),
        (error("_TIMED_OUT", retriable=True, requires_abort=True), TransactionOutcome.REFUSED),
        (error("_STATE"), TransactionOutcome.UNCLEAR),
        (error("_FAIL"), TransactionOutcome.UNCLEAR),
    ],
)
def test_what_the_client_says_of_the_call_counts_and_not_its_code(
    said: KafkaError, outcome: TransactionOutcome
) -> None:
    assert judge(said) is outcome


@pytest.mark.parametrize("retriable", [True, False])
@pytest.mark.parametrize("requires_abort", [True, False])
def test_a_producer_that_is_of_no_use_any_more_is_never_asked_again(retriable: bool, requires_abort: bool) -> None:
    said = error("_FENCED", fatal=True, retriable=retriable, requires_abort=requires_abort)
    assert judge(said) is TransactionOutcome.UNCLEAR


def test_an_error_without_flags_is_unclear() -> None:
    assert judge(KafkaError(KafkaError._FENCED)) is TransactionOutcome.UNCLEAR


def test_an_error_is_never_success() -> None:
    flags = [(a, b, c) for a in (True, False) for b in (True, False) for c in (True, False)]
    assert all(judge(error(fatal=a, retriable=b, requires_abort=c)) is not TransactionOutcome.DONE for a, b, c in flags)


ANSWERED, LOCAL = ["NO_ERROR", "CONCURRENT_TRANSACTIONS", "NOT_COORDINATOR"], ["_TRANSPORT", "_TIMED_OUT"]


@pytest.mark.parametrize(
    ("took_s", "answers", "clear"),
    [
        (0.079, ["NO_ERROR"], True),
        (0.079, [], True),  # by time alone
        (0.08, [], False),
        (4.9, ["NO_ERROR"], True),  # by testimony alone
        (4.9, ["CONCURRENT_TRANSACTIONS", "NO_ERROR"], True),  # each request was answered
        (4.9, ["NO_ERROR", "CONCURRENT_TRANSACTIONS"], False),
        (0.2, ["_TRANSPORT", "NO_ERROR"], False),
        (0.01, ["_TRANSPORT"], False),
    ],
)
def test_a_commit_is_clear_when_no_request_can_be_under_way(took_s: float, answers: list[str], clear: bool) -> None:
    assert is_clear(took_s, answers, 0.08) is clear


@given(st.floats(0, 10), st.lists(st.sampled_from([*ANSWERED, *LOCAL])))
def test_a_request_that_failed_in_the_client_is_never_clear(took_s: float, answers: list[str]) -> None:
    if is_clear(took_s, answers, 0.08):
        assert not set(answers) & set(LOCAL)
        assert took_s < 0.08 or answers[-1] == "NO_ERROR"


@pytest.mark.parametrize(
    ("options", "resend_s"),
    [
        ({}, 0.08),
        ({"retry.backoff.ms": "500"}, 0.4),
        ({"retry.backoff.ms": 2_000}, 1.0),  # by the client's default, none waits longer
        ({"retry.backoff.ms": "2000", "retry.backoff.max.ms": "60000"}, 1.6),
    ],
)
def test_the_earliest_resend(options: dict[str, Any], resend_s: float) -> None:
    assert earliest_resend_s(options) == pytest.approx(resend_s)


class Lines:
    """A logger, and what it got."""

    def __init__(self) -> None:
        self.levels: list[int] = []

    def log(self, level: int, *_rest: Any) -> None:
        self.levels.append(level)


def said(witness: Witness, level: int, facility: str, text: str) -> Witness:
    witness.log(level, "%s [%s] %s", facility, "test#producer-1", text)
    witness.read()
    return witness


def test_the_client_says_what_became_of_each_request() -> None:
    witness = Witness({})
    for name in ("_TRANSPORT", "NO_ERROR"):
        said(
            witness,
            10,
            "ENDTXN",
            f"[thrd:main]: EndTxn returned {name} in state CommittingTransaction (may_retry=true)",
        )
    assert witness.answers == ["_TRANSPORT", "NO_ERROR"]
    witness.ask()
    assert witness.answers == []


@pytest.mark.parametrize(
    ("text", "broken"),
    [
        ("[thrd:b:9092/1]: b:9092/1: Disconnected (after 66ms in state UP) (_TRANSPORT)", True),
        ("[thrd:b:9092/1]: b:9092/1: 1 request(s) timed out: disconnect (after 66ms in state UP) (_TIMED_OUT)", True),
        ("[thrd:b:9092/1]: b:9092/1: something that is new", True),
        ("[thrd:b:9092/1]: b:9092/1: Connect failed (after 0ms in state CONNECT) (_TRANSPORT)", False),
        ("[thrd:b:9092/bootstrap]: b:9092/bootstrap: Decommissioning (after 0ms in state UP)", False),
        ("[thrd:TxnCoordinator]: TxnCoordinator/1: b:9092: Disconnected (after 46ms in state UP)", False),
    ],
)
def test_a_connection_that_breaks_counts_where_records_may_have_been_sent(text: str, broken: bool) -> None:
    witness = said(Witness({}), 10, "FAIL", text)
    assert witness.broken is broken
    witness.watch()
    assert not witness.broken


def test_topics_that_the_coordinator_refuses_are_known_until_the_next_transaction() -> None:
    """Others are refused because of them, and are not meant."""
    witness, coordinator = Witness({"log_level": "0"}), "[thrd:main]: TxnCoordinator/1"
    for partition, why in (("denied", "Topic authorization failed"), ("innocent", "Operation not attempted")):
        text = f'{coordinator}: Failed to add partition "{partition}" [2] to transaction: Broker: {why}'
        said(witness, 40, "ADDPARTS", text)
    said(witness, 10, "ADDPARTS", f"{coordinator}: Registering partitions with transaction")
    assert witness.not_added == {"denied": NOT_ALLOWED.str()}
    witness.watch()
    assert witness.not_added == {}


@pytest.mark.parametrize("facility", ["IMPLICITACK", "DUPSEQ"])
def test_a_delivery_that_the_client_infers_counts_until_the_next_transaction(facility: str) -> None:
    witness = said(Witness({}), 10, facility, "[thrd:b:9092/1]: orders [0] 3 message(s)")
    assert witness.inferred
    said(witness, 10, "TXNAPI", "[thrd:app]: another line")
    assert witness.inferred
    witness.watch()
    assert not witness.inferred


@pytest.mark.parametrize(
    ("options", "passed"),
    [
        ({}, [20, 30, 40]),
        ({"log_level": "4"}, [30, 40]),
        ({"log_level": "0"}, []),
        ({"log_level": "7"}, [20, 30, 40]),
        ({"debug": "broker"}, [10, 20, 30, 40]),
    ],
)
def test_other_lines_pass_as_the_user_wants_them(options: dict[str, Any], passed: list[int]) -> None:
    log = Lines()
    witness = Witness(options, log)
    for level in (10, 20, 30, 40):
        said(witness, level, "STATE", "text")
    assert log.levels == passed


@pytest.mark.parametrize(
    ("brokers", "replicas", "least"), [(0, 1, "1"), (1, 1, "1"), (2, 2, "1"), (3, 3, "2"), (9, 3, "2")]
)
def test_a_topic_of_the_harvesters_own_outlasts_a_broker_where_it_can(brokers: int, replicas: int, least: str) -> None:
    kept = {"min.insync.replicas": least, "unclean.leader.election.enable": "false"}
    assert durable(brokers) == (replicas, kept)


def test_lanes_of_two_groups_have_nothing_in_common() -> None:
    names = {LaneSettings(group, "t", {}, {}).transactional_id(lane) for group in ("a", "b") for lane in (0, 1)}
    assert len(names) == 4


def test_a_producer_is_not_destroyed_while_a_partition_may_be_about_to_be_made_known() -> None:
    """librdkafka 2.16 ends the process otherwise. Its moment is too short to be met on a real one in a test."""
    calls: list[str] = []

    class Producer:
        produce = None

        def flush(self, _timeout_s: float) -> int:
            calls.append("flush")
            return 0

        def __getattr__(self, name: str) -> Any:
            return lambda *_: calls.append(name)

        def __del__(self) -> None:
            calls.append("destroyed")

    Lane(0, "t", Producer(), Witness({}), {}).close()
    assert calls[0] == "flush"
    assert calls[-1] == "destroyed"


@pytest.mark.parametrize(
    ("options", "seconds"), [({}, 305), ({"delivery.timeout.ms": "9000"}, 14), ({"message.timeout.ms": 9000}, 14)]
)
def test_records_have_their_delivery_timeout_to_be_answered(options: dict[str, Any], seconds: float) -> None:
    """librdkafka may never report on what a transaction holds for a deleted topic."""
    waited: list[float] = []

    def flush(timeout_s: float) -> int:
        waited.append(timeout_s)
        return 1

    producer = SimpleNamespace(produce=None, flush=flush)
    lane = Lane(0, "t", producer, Witness({}), options)
    assert lane.conclude(EncodedProgress(b"", b"")) is TransactionOutcome.UNCLEAR
    assert waited == [seconds] == [answer_s(options)]


def test_what_kafka_waits_for_before_it_ends_a_transaction_is_told() -> None:
    lanes = Lanes(LaneSettings("group", "t", {}, {}), lambda _: None)
    text = f"Failed to initialize Producer ID: {KafkaError(KafkaError.CONCURRENT_TRANSACTIONS).str()}"
    lane: Any = SimpleNamespace(number=3, error=text, refused=None, not_added={})
    assert "the last transaction of group.3" in lanes.explain(lane)
    assert "min.insync.replicas" in lanes.explain(lane)
