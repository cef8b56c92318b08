"""Variables and overrides of a configuration."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harvester.config.load import apply_overrides, interpolate_table, parse_value


def test_variables_are_replaced_where_they_stand() -> None:
    table = {"a": "x-${V}-y", "t": {"b": ["${W:-w}", 1], "c": "${E:-e}"}, "d": "$$${V} $5 $V"}
    resolved, problems = interpolate_table(table, {"V": "1${V}", "E": ""})
    assert problems == []
    assert resolved == {"a": "x-1${V}-y", "t": {"b": ["w", 1], "c": "e"}, "d": "$1${V} $5 $V"}


def test_every_missing_variable_is_reported_with_its_path() -> None:
    resolved, problems = interpolate_table({"a": "${A}", "t": {"b": "${B} ${1}"}, "c": "${E}"}, {"E": ""})
    assert [(problem.path, problem.message) for problem in problems] == [
        ("a", "the environment variable A is not set"),
        ("t.b", "the environment variable B is not set"),
        ("t.b", "has a '${' that does not refer to a variable"),
    ]
    assert resolved["c"] == ""


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("limits.shards=4", {"limits": {"shards": 4}}),
        ("limits.heartbeat_timeout=5s", {"limits": {"heartbeat_timeout": "5s"}}),
        ('limits.heartbeat_timeout="5s"', {"limits": {"heartbeat_timeout": "5s"}}),
        ("base_kafka_config.bootstrap.servers=h:1", {"base_kafka_config": {"bootstrap.servers": "h:1"}}),
        ('producer_kafka_config."linger.ms"=5', {"producer_kafka_config": {"linger.ms": 5}}),
        ("data_source=host=a password=b=c", {"data_source": "host=a password=b=c"}),
        ("name=123", {"name": "123"}),
        ("name=true", {"name": "true"}),
        ("name=", {"name": ""}),
        ('limits={shards = 2, mark_backoff = "1ms"}', {"limits": {"shards": 2, "mark_backoff": "1ms"}}),
        ("outbox_table='\"My Schema\".x'", {"outbox_table": '"My Schema".x'}),
    ],
)
def test_overrides(override: str, expected: object) -> None:
    data, _, problems = apply_overrides({}, [override])
    assert (data, problems) == (expected, [])


def test_overrides_replace_what_the_file_says_under_another_spelling() -> None:
    file = {"limits": {"shards": 2, "send_buffer": 3}, "base_kafka_config": {"bootstrap": {"servers": "a:1"}}}
    data, touched, problems = apply_overrides(
        file, ["limits.shards=4", "limits.shards=5", "base_kafka_config.metadata.broker.list=b:1"]
    )
    assert problems == []
    assert data == {
        "limits": {"send_buffer": 3, "shards": 5},
        "base_kafka_config": {"metadata.broker.list": "b:1"},
    }
    assert touched == {"limits.shards", "base_kafka_config.metadata.broker.list"}
    assert file["limits"] == {"shards": 2, "send_buffer": 3}, "the file's own data was changed"


def test_an_override_that_is_none_is_reported_without_its_text() -> None:
    _, _, problems = apply_overrides({"name": "x"}, ["hunter2", "=hunter2", "a..b=hunter2", "name.x=hunter2"])
    assert len(problems) == 4
    assert "hunter2" not in "".join(map(str, problems))


def test_an_override_cannot_bring_in_a_second_setting() -> None:
    assert parse_value("1\nlimits = 2") == "1\nlimits = 2"


@given(st.text(max_size=20))
def test_text_without_a_reference_stays_and_an_escaped_one_comes_back(text: str) -> None:
    assert interpolate_table({"a": text.replace("$", "$$")}, {}) == ({"a": text}, [])
    assert interpolate_table({"a": "${V}"}, {"V": text}) == ({"a": text}, [])
