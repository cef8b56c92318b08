"""What holds for every configuration, however odd."""

from __future__ import annotations

import contextlib
import pickle
import tomllib
from datetime import timedelta
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from psycopg.conninfo import make_conninfo

from harvester.config import Config, Limits, load_config
from harvester.config.dsn import mask_dsn, parse_dsn
from harvester.config.kafka_options import MASK
from harvester.config.load import build
from harvester.config.timing import PURGE_MARGIN, SCAN_INTERVAL, rebalance_notice
from harvester.errors import ConfigurationError, Problem

SECRET = "Hunter2IsMySecret"
NAMES = [*Config.model_fields, *Limits.model_fields, "level", "zzz"]
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.dates() | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
DURATION_TEXT = st.integers(-5, 10**7).map(lambda ms: f"{ms}ms")
VALUES = st.one_of(JUNK, DURATION_TEXT, st.integers(-3, 300), st.sampled_from(["5s", "1s", "info", "outbox", "a=b"]))
OPTIONS = st.dictionaries(
    st.sampled_from(["bootstrap.servers", "delivery.timeout.ms", "max.poll.interval.ms", "acks", "linger.ms", "x"]),
    st.integers(-1, 40_000) | JUNK,
)
SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "limits": st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=5) | JUNK,
        "logging": st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=2) | JUNK,
        "base_kafka_config": OPTIONS | JUNK,
        "producer_kafka_config": OPTIONS | JUNK,
    }
    | dict.fromkeys(("leader_group_id", "leader_topic", "data_source", "outbox_table", "name", "zzz"), VALUES),
)


def outcome(settings: dict[str, Any]) -> tuple[Config | None, list[Problem]]:
    try:
        return build(settings), []
    except ConfigurationError as error:
        return None, list(error.problems)


@given(SETTINGS)
def test_any_junk_gives_a_configuration_or_a_configuration_error(settings: dict[str, Any]) -> None:
    config, problems = outcome(settings)
    assert all(problem.path and problem.message for problem in problems)
    if config is None:
        assert problems
        return
    assert pickle.loads(pickle.dumps(config)) == config
    assert_consistent(config)


@given(st.dictionaries(st.text(max_size=10), JUNK, max_size=4))
def test_any_table_gives_a_configuration_or_a_configuration_error(settings: dict[str, Any]) -> None:
    _, problems = outcome(settings)
    assert all(str(problem).isprintable() for problem in problems)


@given(st.lists(st.text(max_size=40) | st.from_regex(r"(limits|base_kafka_config)\.[a-z._\"]{1,9}=.{0,9}"), max_size=3))
def test_any_override_gives_a_configuration_or_a_configuration_error(overrides: list[str]) -> None:
    with contextlib.suppress(ConfigurationError):
        load_config(None, ["leader_group_id=g", *overrides], {})


MS = st.integers(1, 60_000).map(lambda ms: timedelta(milliseconds=ms))


@given(
    heartbeat=MS,
    optional=st.fixed_dictionaries(
        {}, optional=dict.fromkeys(("session_timeout", "drain_interval", "queue_timeout"), MS)
    ),
    delivery=st.none() | st.integers(1, 60_000),
    rebalance=st.none() | st.integers(1, 120_000),
)
def test_whatever_is_accepted_keeps_the_rules_of_the_times(
    heartbeat: timedelta, optional: dict[str, timedelta], delivery: int | None, rebalance: int | None
) -> None:
    config, problems = outcome(
        {
            "leader_group_id": "g",
            "limits": {"heartbeat_timeout": heartbeat, **optional},
            "producer_kafka_config": {} if delivery is None else {"delivery.timeout.ms": delivery},
            "base_kafka_config": {} if rebalance is None else {"max.poll.interval.ms": rebalance},
        }
    )
    if config is None:
        assert all(problem.allowed for problem in problems)
        return
    assert_consistent(config)


@given(st.integers(1200, 1_000_000))
def test_the_derived_defaults_keep_the_rules(heartbeat_ms: int) -> None:
    assert_consistent(build({"leader_group_id": "g", "limits": {"heartbeat_timeout": f"{heartbeat_ms}ms"}}))


def assert_consistent(config: Config) -> None:
    limits, delivery = config.limits, config.delivery_timeout
    assert limits.heartbeat_timeout + delivery + SCAN_INTERVAL <= limits.session_timeout
    assert delivery + PURGE_MARGIN <= limits.drain_interval
    assert limits.drain_interval <= config.rebalance_timeout - config.group_heartbeat_interval - SCAN_INTERVAL
    notice = rebalance_notice(limits.session_timeout, limits.heartbeat_timeout, limits.min_poll_interval)
    assert config.rebalance_timeout >= limits.session_timeout + notice
    assert config.join_wait < limits.session_timeout + notice
    assert limits.heartbeat_timeout >= 4 * limits.min_poll_interval
    producer, consumer = config.producer_options(), config.consumer_options()
    assert timedelta(milliseconds=int(producer["delivery.timeout.ms"])) == delivery
    assert (producer["acks"], producer["enable.idempotence"]) == ("all", "true")
    assert (consumer["enable.auto.commit"], consumer["group.id"]) == ("false", config.leader_group_id)
    assert all(isinstance(value, str) for value in (producer | consumer | config.common_options()).values())


BEFORE_AND_AFTER = st.text("ab '\\=@:/%?#[]&", max_size=6)


@given(
    BEFORE_AND_AFTER, BEFORE_AND_AFTER, st.sampled_from(["password={}", "{}", "postgresql://u:{}@h:1/db", "host={}"])
)
def test_a_broken_connection_string_is_never_repeated(before: str, after: str, form: str) -> None:
    text = form.format(f"{before}{SECRET}{after}")
    _, problems = outcome({"leader_group_id": "g", "data_source": text, "limits": {"shards": 0}})
    assert SECRET not in repr(problems)
    if any(problem.path == "data_source" for problem in problems):
        assert mask_dsn(text) == MASK


@given(st.text(st.characters(exclude_characters="\x00", codec="utf-8"), min_size=1, max_size=20))
def test_a_password_is_never_printed(password: str) -> None:
    password += SECRET
    config = Config(
        leader_group_id="g",
        data_source=make_conninfo("", host="a", password=password),
        base_kafka_config={"sasl.password": password, "ssl.key.pem": password},
    )
    assert SECRET not in f"{config!r}{config}{config.masked()}"
    assert parse_dsn(config.dsn)["password"] == password
    assert config.producer_options()["sasl.password"] == password


@given(SETTINGS)
def test_what_is_shown_is_toml_and_loads_again(settings: dict[str, Any]) -> None:
    from harvester.config import Loaded, settings_of

    try:
        config = build(settings | {"data_source": "host=a", "leader_group_id": "g"})
    except ConfigurationError:
        return
    lines: dict[str, list[str]] = {}
    for setting in settings_of(Loaded(config, None, frozenset(), frozenset())):
        lines.setdefault(setting.table, []).append(setting.toml)
    text = "\n".join(lines.pop("")) + "".join(f"\n[{table}]\n" + "\n".join(rest) for table, rest in lines.items())
    assert build(tomllib.loads(text)).masked() == config.masked()
