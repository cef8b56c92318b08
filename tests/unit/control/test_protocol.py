"""What goes over a control socket comes back equal; anything else is refused."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harvester.control.protocol import (
    COMMANDS,
    NotUnderstood,
    arguments_of,
    from_json,
    object_of,
)
from harvester.http.server import json_line
from harvester.status import Backlog, KeyStatus, LastEvent, ShardState, ShardStatus, State, Status, adapter, to_json
from tests.support.statuses import KEY

adapter(Status)  # takes longer to make than Hypothesis allows an example

ARGUMENTS: dict[type, st.SearchStrategy[Any]] = {
    int: st.integers(),
    float: st.floats(allow_nan=False, allow_infinity=False),
    str: st.text(),
}
REQUESTS = st.sampled_from(sorted(COMMANDS)).flatmap(
    lambda command: st.tuples(
        st.just(command),
        st.fixed_dictionaries({name: ARGUMENTS[kind] for name, kind in COMMANDS[command].items()}),
    )
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)
COUNTS = st.integers(0, 2**63)
RATES = st.floats(0, allow_nan=False, allow_infinity=False)
TIMES = st.datetimes(datetime(1970, 1, 1), datetime(9999, 1, 1), timezones=st.just(UTC))  # noqa: DTZ001
SHARDS = st.builds(
    ShardStatus,
    index=st.integers(0, 255),
    state=st.sampled_from(ShardState),
    pid=st.none() | COUNTS,
    rate_per_s=RATES,
    cpu_percent=st.none() | RATES,
    **dict.fromkeys(
        ("queued", "in_flight", "parked", "delivered", "retries", "errors", "quarantined", "restarts"), COUNTS
    ),
)
STATUSES = st.builds(
    Status,
    at=TIMES,
    name=st.text(),
    outbox=st.text(),
    state=st.sampled_from(State),
    leader_id=st.none() | st.uuids(),
    term=st.none() | COUNTS,
    state_since_at=TIMES,
    started_at=TIMES,
    shards=st.lists(SHARDS, max_size=3).map(tuple),
    rate_per_s=RATES,
    rate_history=st.lists(RATES, max_size=60).map(tuple),
    p50_ms=st.none() | RATES,
    p99_ms=st.none() | RATES,
    backlog=st.none() | st.builds(Backlog, COUNTS, st.booleans(), st.none() | RATES, st.none() | COUNTS),
    problem=st.none() | st.text(),
    events=st.lists(st.builds(LastEvent, TIMES, st.text()), max_size=3).map(tuple),
    paused_since_at=st.none() | TIMES,
    **dict.fromkeys(("in_flight", "max_in_flight", "queued", "delivered", "quarantined"), COUNTS),
)


@given(REQUESTS)
def test_arguments_come_back_equal(request: tuple[str, dict[str, Any]]) -> None:
    command, arguments = request
    assert arguments_of(command, json_line(arguments)) == arguments


@given(st.dictionaries(st.text(), JSON))
def test_an_object_is_one_line_and_comes_back_equal(values: dict[str, Any]) -> None:
    line, rest = json_line(values).split(b"\n")
    assert rest == b""
    assert object_of(line) == values


@given(STATUSES)
def test_a_status_comes_back_equal(status: Status) -> None:
    assert from_json(Status, object_of(json_line(to_json(status)))) == status


def test_what_is_known_of_a_key_comes_back_equal() -> None:
    assert from_json(KeyStatus, object_of(json_line(to_json(KEY)))) == KEY


@given(STATUSES)
def test_an_older_or_newer_status_can_be_read(status: Status) -> None:
    """Members that are not known are ignored, and those with a default may be missing."""
    values = {**to_json(status), "of_tomorrow": [1]}
    del values["paused_since_at"]
    assert from_json(Status, values) == replace(status, paused_since_at=None)


@given(st.sampled_from(sorted(COMMANDS)), st.binary(max_size=200))
def test_any_bytes_are_refused_or_read(command: str, body: bytes) -> None:
    with suppress(NotUnderstood):
        arguments_of(command, body)


@given(st.sampled_from(sorted(COMMANDS)), JSON)
def test_any_json_is_refused_or_read(command: str, value: Any) -> None:
    with suppress(NotUnderstood):
        arguments_of(command, json_line(value))
    with suppress(NotUnderstood):
        from_json(Status, value if isinstance(value, dict) else {"at": value})


@pytest.mark.parametrize(
    ("command", "arguments", "about"),
    [
        ("scale", {}, "shards"),
        ("scale", {"shards": "4", "within_s": 1}, "shards"),
        ("scale", {"shards": True, "within_s": 1}, "shards"),
        ("scale", {"shards": 4, "within_s": True}, "within_s"),
        ("loglevel", {"level": 4}, "level"),
        ("watch", {"every_s": float("inf")}, "every_s"),
        ("pause", ["pause"], "not a JSON object"),
    ],
)
def test_what_is_wrong_with_a_request_is_named(command: str, arguments: Any, about: str) -> None:
    with pytest.raises(NotUnderstood, match=about):
        arguments_of(command, json.dumps(arguments).encode())


def test_a_whole_number_of_seconds_will_do() -> None:
    body = json_line({"shards": 4, "within_s": 5, "new": 1})
    assert arguments_of("scale", body) == {"shards": 4, "within_s": 5.0}


def test_a_status_that_is_none_is_refused() -> None:
    with pytest.raises(NotUnderstood, match="members of the status are missing or wrong"):
        from_json(Status, {"name": "x"})
