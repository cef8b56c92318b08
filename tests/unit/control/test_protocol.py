"""What is said on a control socket comes back equal; what is none is refused, whatever it is."""

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
    Answer,
    Lines,
    NotUnderstood,
    Request,
    decode_answer,
    decode_request,
    encode_answer,
    encode_request,
    from_json,
    to_json,
)
from harvester.status import Backlog, LastEvent, ShardState, ShardStatus, State, Status

ARGUMENTS: dict[type, st.SearchStrategy[Any]] = {
    int: st.integers(),
    float: st.floats(allow_nan=False, allow_infinity=False),
    str: st.text(),
}
REQUESTS = st.sampled_from(sorted(COMMANDS)).flatmap(
    lambda command: st.builds(
        Request,
        st.just(command),
        st.fixed_dictionaries({name: ARGUMENTS[kind] for name, kind in COMMANDS[command].items()}),
    )
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)
ANSWERS = st.builds(Answer, st.dictionaries(st.text(), JSON)) | st.builds(
    Answer, st.just({}), st.text(), st.none() | st.text()
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


def one_line(data: bytes) -> bytes:
    line, rest = data.split(b"\n")
    assert rest == b""
    return line


@given(REQUESTS)
def test_a_request_comes_back_equal(request: Request) -> None:
    assert decode_request(one_line(encode_request(request))) == request


@given(ANSWERS)
def test_an_answer_comes_back_equal(answer: Answer) -> None:
    assert decode_answer(one_line(encode_answer(answer))) == answer


@given(STATUSES)
def test_a_status_comes_back_equal(status: Status) -> None:
    answer = decode_answer(one_line(encode_answer(Answer(to_json(status)))))
    assert from_json(answer.result) == status


@given(STATUSES)
def test_an_older_or_newer_status_can_be_read(status: Status) -> None:
    """Members that are not known are ignored, and those with a default may be missing."""
    values = {**to_json(status), "of_tomorrow": [1]}
    del values["paused_since_at"]
    assert from_json(values) == replace(status, paused_since_at=None)


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_or_read(line: bytes) -> None:
    with suppress(NotUnderstood):
        decode_request(line)
    with suppress(NotUnderstood):
        decode_answer(line)


@given(JSON)
def test_any_json_is_refused_or_read(value: Any) -> None:
    for said in (value, {"v": 1, "command": value}, {"v": 1, "command": "scale", "arguments": value}):
        with suppress(NotUnderstood):
            decode_request(json.dumps(said).encode())
    for said in ({"v": 1, "ok": value}, {"v": 1, "ok": False, "error": value}, {"v": 1, "ok": True, "result": value}):
        with suppress(NotUnderstood):
            decode_answer(json.dumps(said).encode())
    with suppress(NotUnderstood):
        from_json(value if isinstance(value, dict) else {"at": value})


@given(st.lists(st.binary(max_size=10).map(lambda data: data.replace(b"\n", b"")), max_size=5), st.integers(1, 7))
def test_lines_are_cut_wherever_the_stream_is(lines: list[bytes], size: int) -> None:
    data = b"".join(line + b"\n" for line in lines)
    cutter = Lines(10)
    found = [line for at in range(0, len(data), size) for line in cutter.feed(data[at : at + size])]
    assert found == lines


@pytest.mark.parametrize("data", [b"x" * 11, b"x" * 11 + b"\n", b"ok\n" + b"x" * 11])
def test_a_line_that_is_too_long_is_refused(data: bytes) -> None:
    with pytest.raises(NotUnderstood, match="longer than 10"):
        list(Lines(10).feed(data))


@pytest.mark.parametrize("version", [0, 2, True, "1", None])
def test_another_version_is_refused(version: object) -> None:
    said = {"v": version, "command": "pause", "ok": True, "result": {}}
    for decode in (decode_request, decode_answer):
        with pytest.raises(NotUnderstood, match="version"):
            decode(json.dumps(said).encode())


@pytest.mark.parametrize(
    ("said", "about"),
    [
        ({"command": "explode"}, "no command 'explode'"),
        ({"command": "scale"}, "shards"),
        ({"command": "scale", "arguments": {"shards": "4", "within_s": 1}}, "shards"),
        ({"command": "scale", "arguments": {"shards": True, "within_s": 1}}, "shards"),
        ({"command": "scale", "arguments": {"shards": 4, "within_s": True}}, "within_s"),
        ({"command": "loglevel", "arguments": {"level": 4}}, "level"),
        ({"command": ["pause"]}, "names no command"),
    ],
)
def test_what_a_harvester_cannot_do_is_named(said: dict[str, Any], about: str) -> None:
    with pytest.raises(NotUnderstood, match=about):
        decode_request(json.dumps({"v": 1, **said}).encode())


def test_a_whole_number_of_seconds_will_do() -> None:
    line = json.dumps({"v": 1, "command": "scale", "arguments": {"shards": 4, "within_s": 5, "new": 1}}).encode()
    assert decode_request(line) == Request("scale", {"shards": 4, "within_s": 5.0})


def test_a_status_that_is_none_is_refused() -> None:
    with pytest.raises(NotUnderstood, match="a status that is none"):
        from_json({"name": "x"})
