"""The configuration as a whole: defaults, rules, Kafka options, files, and all problems at once."""

from __future__ import annotations

import ast
import pickle
import re
import tomllib
import traceback
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient

from harvester import StoreSettings
from harvester.config import Config, Limits, Logging, PoisonSettings, check_clients, format_duration, load, load_config
from harvester.config.kafka_options import REFUSED
from harvester.errors import ConfigurationError, ExitCode, Problem
from harvester.relay.put_away import PutAwaySettings
from harvester.wiring import shard_specs

ROOT = Path(__file__).resolve().parents[3]
GROUP = "leader_group_id=g"


def given(**settings: Any) -> Config:
    return Config(**({"leader_group_id": "g"} | settings))


def problems_of(settings: Mapping[str, Any]) -> dict[str, str]:
    with pytest.raises(ConfigurationError) as caught:
        given(**settings)
    return {problem.path: str(problem) for problem in caught.value.problems}


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def ms(value: int) -> timedelta:
    return timedelta(milliseconds=value)


# --- defaults


def test_tables_may_be_plain_mappings_and_type_checkers_know() -> None:
    limits = MappingProxyType({"shards": 2, "heartbeat_timeout": "2s"})
    config = Config(leader_group_id="g", limits=limits, logging={"level": "debug"}, archive_retention="3d")
    assert (config.limits.shards, config.limits.heartbeat_timeout, config.logging.level) == (2, ms(2000), "debug")
    tree = ast.parse((ROOT / "harvester/config/model.py").read_text())
    [declared] = [
        node
        for kind in tree.body
        if isinstance(kind, ast.ClassDef) and kind.name == "Config"
        for node in ast.walk(kind)
        if isinstance(node, ast.FunctionDef) and node.name == "__init__"
    ]
    assert [argument.arg for argument in declared.args.kwonlyargs] == list(Config.model_fields)


def test_no_default_changes_unnoticed() -> None:
    """Users rely on them: a new limit is added here, a changed one goes into the changelog."""
    limits = Limits()
    assert {name: getattr(limits, name) for name in Limits.model_fields} == {
        "min_poll_interval": ms(100),
        "heartbeat_timeout": ms(3000),
        "session_timeout": ms(6000),
        "queue_timeout": ms(30_000),
        "drain_interval": ms(2500),
        "mark_backoff": ms(10),
        "mark_backoff_max": ms(100),
        "io_error_backoff": ms(500),
        "head_scan_interval": ms(60_000),
        "max_in_flight_records": 1000,
        "shards": 8,
        "records_per_shard": 200,  # ours
        "send_buffer": 10,
        "max_queued_per_key": 100,
        "max_attempts": 5,
        "max_transaction_records": 5_000,
        "mark_query_records": 100,
        "min_metrics_interval": ms(5000),
        "retry_backoff": ms(100),
        "retry_backoff_max": ms(10_000),
        "restart_budget": 5,
        "restart_window": ms(60_000),
    }
    config = given()
    assert config.leader_topic == "g.neli"
    assert config.base_kafka_config == {"bootstrap.servers": "localhost:9092"}
    assert config.producer_kafka_config == {}
    assert config.table.sql == '"outbox"'
    assert config.logging == Logging(level="info")
    assert config.poison == PoisonSettings(policy="quarantine", notice_topic="")
    assert (config.oversize.policy, config.oversize.store_settings) == ("quarantine", None)
    assert (config.marking, config.archive, config.archive_retention) == ("memory", "off", timedelta(days=7))
    assert re.fullmatch(r".+_[0-9]+_[0-9]{10}", config.name)
    assert (config.delivery_timeout, config.rebalance_timeout) == (ms(2000), ms(11_000))
    assert (config.group_heartbeat_interval, config.join_wait) == (ms(200), ms(4300))


@pytest.mark.parametrize("limits", [{"shards": 4}, Limits(shards=4)], ids=["table", "object"])
def test_transactions_have_bounds_of_their_own(limits: Any) -> None:
    once = given(delivery="exactly-once", limits=limits).limits
    assert (once.max_in_flight_records, once.mark_query_records, once.shards) == (10_000, 1_000, 4)
    assert given(delivery="exactly-once").limits.mark_query_records == 1_000
    chosen = given(delivery="exactly-once", limits={"max_in_flight_records": 50}).limits
    assert (chosen.max_in_flight_records, chosen.mark_query_records) == (50, 1_000)
    assert given(delivery="at-least-once", limits=limits).limits.max_in_flight_records == 1_000


def test_derived_defaults_follow_what_was_given() -> None:
    config = given(limits={"heartbeat_timeout": "8s", "queue_timeout": "3s"})
    assert config.limits.session_timeout == ms(16_000)
    assert config.limits.drain_interval == ms(3000)
    assert config.delivery_timeout == ms(2500)
    assert given(limits={"heartbeat_timeout": "8s"}).delivery_timeout == ms(7000)
    assert given(limits={"heartbeat_timeout": "1s"}).delivery_timeout == ms(2000)
    assert given(limits={"session_timeout": "15s"}).limits.drain_interval == ms(11_500)
    long_drain = given(limits={"drain_interval": "1m"})
    assert long_drain.rebalance_timeout == ms(61_200)
    assert long_drain.delivery_timeout == ms(2000)
    assert given(limits={"drain_interval": "60000.5ms"}).rebalance_timeout == ms(61_201)


def test_without_a_telling_script_the_group_must_be_named() -> None:
    with pytest.raises(ConfigurationError) as caught:
        Config()  # the main script is pytest, or the worker of one
    assert [problem.path for problem in caught.value.problems] == ["leader_group_id"]


def test_durations_in_python_may_be_timedeltas() -> None:
    assert Limits(queue_timeout=timedelta(seconds=7)).queue_timeout == timedelta(seconds=7)


def test_the_configuration_survives_pickling_with_its_secrets() -> None:
    config = given(data_source="host=a password=hunter2")
    copy = pickle.loads(pickle.dumps(config))
    assert copy == config
    assert copy.data_source == "host=a password=hunter2"


# --- rules


@pytest.mark.parametrize(
    ("settings", "path", "parts"),
    [
        (
            {"producer_kafka_config": {"delivery.timeout.ms": 2001}, "limits": {"drain_interval": "20s"}},
            "limits.session_timeout",
            ["6s", "3s", "2.001s", "6.001s", "at most 2s", "P12"],
        ),
        (
            {
                "producer_kafka_config": {"message.timeout.ms": 2001},
                "limits": {"session_timeout": "9s", "drain_interval": "2.5s"},
            },
            "limits.drain_interval",
            ["2.5s", "2.001s", "2.501s", "at most 2s", "P13"],
        ),
        (
            {"base_kafka_config": {"max.poll.interval.ms": 20_000}, "limits": {"drain_interval": "18.801s"}},
            'base_kafka_config."max.poll.interval.ms"',
            ["20s", "18.801s", "20.001s", "at most 18.8s", "P13"],
        ),
        (
            {"base_kafka_config": {"max.poll.interval.ms": 10_999}},
            'base_kafka_config."max.poll.interval.ms"',
            ["10.999s", "6s", "5s", "at least 11s", "P39"],
        ),
        (
            {"limits": {"heartbeat_timeout": "2s", "min_poll_interval": "501ms"}},
            "limits.heartbeat_timeout",
            ["2s", "501ms", "2.004s"],
        ),
        ({"limits": {"session_timeout": "4.099s"}}, "limits.session_timeout", ["4.099s", "4.1s"]),
        ({"limits": {"drain_interval": "599ms"}}, "limits.drain_interval", ["599ms", "600ms"]),
        (
            {"producer_kafka_config": {"delivery.timeout.ms": 0}},
            'producer_kafka_config."delivery.timeout.ms"',
            ["forever"],
        ),
        ({"limits": {"mark_backoff": "101ms"}}, "limits.mark_backoff_max", ["101ms", "100ms"]),
        ({"limits": {"retry_backoff": "11s"}}, "limits.retry_backoff_max", ["11s", "10s"]),
        ({"producer_kafka_config": {"linger.ms": 2000}}, 'producer_kafka_config."linger.ms"', ["below 2000"]),
    ],
)
def test_a_broken_rule_shows_the_numbers(settings: dict[str, Any], path: str, parts: list[str]) -> None:
    found = problems_of(settings)
    assert list(found) == [path]
    for part in parts:
        assert part in found[path]


@pytest.mark.parametrize(
    "settings",
    [
        {"producer_kafka_config": {"delivery.timeout.ms": 2000}, "limits": {"drain_interval": "20s"}},
        {"producer_kafka_config": {"delivery.timeout.ms": 2000}},
        {"base_kafka_config": {"max.poll.interval.ms": 20_000}, "limits": {"drain_interval": "18.8s"}},
        {"base_kafka_config": {"max.poll.interval.ms": 11_000}},
        {"limits": {"heartbeat_timeout": "2.004s", "min_poll_interval": "501ms"}},
        {"limits": {"session_timeout": "4.1s"}},
        {"limits": {"drain_interval": "600ms"}},
    ],
)
def test_at_the_bound_a_rule_holds(settings: dict[str, Any]) -> None:
    given(**settings)


# --- values


@pytest.mark.parametrize(
    ("settings", "path", "part"),
    [
        ({"limits": {"heartbeat_timeout": 5}}, "limits.heartbeat_timeout", '"5s" or "5ms"'),
        ({"limits": {"heartbeat_timeout": 2.5}}, "limits.heartbeat_timeout", '"2.5s"'),
        ({"limits": {"heartbeat_timeout": True}}, "limits.heartbeat_timeout", "must be a duration"),
        ({"limits": {"heartbeat_timeout": "0s"}}, "limits.heartbeat_timeout", "above 0"),
        ({"limits": {"restart_window": timedelta(days=2)}}, "limits.restart_window", "24h"),
        ({"limits": {"session_timeout": "61m"}}, "limits.session_timeout", "1h"),
        ({"limits": {"shards": 0}}, "limits.shards", "1 to 256"),
        ({"limits": {"shards": 257}}, "limits.shards", "1 to 256"),
        ({"limits": {"shards": True}}, "limits.shards", "whole number"),
        ({"limits": {"shards": 8.0}}, "limits.shards", "whole number"),
        ({"limits": {"shards": None}}, "limits.shards", "whole number"),
        ({"limits": {"shard": 4}}, "limits.shard", "did you mean 'shards'"),
        ({"limits": 4}, "limits", "table"),
        ({"limits": {"sendBuffer": 4}}, "limits.sendBuffer", "did you mean 'send_buffer'"),
        ({"shards": 4}, "shards", "did you mean 'limits.shards'"),
        ({"LeaderGroupID": "x"}, "LeaderGroupID", "did you mean 'leader_group_id'"),
        ({"dataSource": "x"}, "dataSource", "did you mean 'data_source'"),
        ({"zzz": "hunter2"}, "zzz", "unknown setting"),
        ({"a\x1b[31m": 1}, "'a\\x1b[31m'", "unknown setting"),
        ({"record_header": "x" * 256}, "record_header", "cannot name a header"),
        ({"delivery": "sometimes"}, "delivery", "at-least-once"),
        ({"logging": {"level": "loud"}}, "logging.level", "trace, debug, info, warning, error"),
        ({"logging": {"level": 3}}, "logging.level", "text"),
        ({"logging": "debug"}, "logging", "table"),
        ({"leader_topic": "no spaces"}, "leader_topic", "topic name"),
        ({"leader_topic": ".."}, "leader_topic", "topic name"),
        ({"leader_group_id": "a/b"}, "leader_topic", "leader_group_id"),
        ({"leader_group_id": " "}, "leader_group_id", "printable"),
        ({"name": "a\nb"}, "name", "printable"),
        ({"outbox_table": "a.b.c"}, "outbox_table", "not a table name"),
        ({"outbox_table": 'x"; drop table y'}, "outbox_table", "not a table name"),
        ({"data_source": {"password": "hunter2"}}, "data_source", "text"),
        ({"data_source": "hunter2"}, "data_source", "without '='"),
        ({"base_kafka_config": "localhost"}, "base_kafka_config", "table"),
        ({"base_kafka_config": {"sasl.password": ["hunter2"]}}, 'base_kafka_config."sasl.password"', "type"),
        ({"base_kafka_config": {"client.rack": float("nan")}}, 'base_kafka_config."client.rack"', "type"),
    ],
)
def test_a_wrong_value_is_reported_at_its_path(settings: dict[str, Any], path: str, part: str) -> None:
    found = problems_of(settings)
    assert list(found) == [path]
    assert part in found[path]
    assert "hunter2" not in found[path]


def test_numbers_may_come_as_text_from_the_environment() -> None:
    assert load_config(None, [GROUP, "limits.shards=${N}"], {"N": "3"}).limits.shards == 3


@pytest.mark.parametrize("level", ["trace", "Debug", "INFO"])
def test_levels_in_any_case(level: str) -> None:
    assert Logging(level=level).level == level.lower()


# --- Kafka options


@pytest.mark.parametrize(
    "option",
    [
        *REFUSED,
        "acks",
        "auto.commit.enable",
        "group.id",
        "group.instance.id",
        "group.protocol",
        "error_cb",
        "stats_cb",
        "oauth_cb",
        "dr_msg_cb",
    ],
)
@pytest.mark.parametrize("table", ["base_kafka_config", "producer_kafka_config"])
def test_options_that_guard_an_invariant_are_refused_with_a_reason(table: str, option: str) -> None:
    found = problems_of({table: {option: "all"}})
    assert list(found) == [f'{table}."{option}"']
    assert len(found[f'{table}."{option}"']) > 60


@pytest.mark.parametrize(
    ("table", "option", "value"),
    [
        ("producer_kafka_config", "max.in.flight", 6),
        ("producer_kafka_config", "max.in.flight.requests.per.connection", "1000000"),
        ("producer_kafka_config", "retries", 0),
        ("producer_kafka_config", "message.send.max.retries", 0),
        ("producer_kafka_config", "delivery.timeout.ms", "soon"),
        ("producer_kafka_config", "delivery.timeout.ms", -1),
        ("base_kafka_config", "max.poll.interval.ms", "1.5"),
        ("base_kafka_config", "a b", 1),
        ("base_kafka_config", "linger.ms", 1),
        ("base_kafka_config", "delivery.timeout.ms", 2000),
        ("producer_kafka_config", "max.poll.interval.ms", 60_000),
        ("producer_kafka_config", "fetch.min.bytes", 1),
    ],
)
def test_values_out_of_range_and_options_in_the_wrong_table(table: str, option: str, value: object) -> None:
    assert list(problems_of({table: {option: value}})) == [f'{table}."{option}"']


def test_one_option_under_two_names_is_refused() -> None:
    found = problems_of({"producer_kafka_config": {"delivery.timeout.ms": 1500, "message.timeout.ms": 1500}})
    assert "same option" in found['producer_kafka_config."message.timeout.ms"']


def test_options_become_text_and_need_no_quotes() -> None:
    config = given(base_kafka_config=tomllib.loads("socket.keepalive.enable = true\nclient.rack = 'r'\nx = 1.5"))
    assert config.base_kafka_config == {
        "bootstrap.servers": "localhost:9092",
        "socket.keepalive.enable": "true",
        "client.rack": "r",
        "x": "1.5",
    }


def test_each_client_gets_its_options() -> None:
    config = given(
        name="me",
        base_kafka_config={"bootstrap.servers": "h:1", "client.rack": "r", "max.poll.interval.ms": 30_000},
        producer_kafka_config={"queue.buffering.max.ms": 7, "compression.type": "lz4", "client.rack": "p"},
        limits={"max_in_flight_records": 200_000},
    )
    common = {"client.id": "me", "log_level": "6", "socket.nagle.disable": "true", "bootstrap.servers": "h:1"}
    assert config.common_options() == common | {"client.rack": "r"}
    assert config.producer_options() == common | {
        "client.rack": "p",
        "queue.buffering.max.ms": "7",
        "max.in.flight.requests.per.connection": "2",
        "compression.type": "lz4",
        "topic.metadata.propagation.max.ms": "1000",
        "queue.buffering.max.messages": "400000",
        "queue.buffering.max.kbytes": "1048576",
        "acks": "all",
        "enable.idempotence": "true",
        "partitioner": "murmur2_random",
        "delivery.timeout.ms": "2000",
    }
    assert config.consumer_options() == common | {
        "client.rack": "r",
        "fetch.wait.max.ms": "100",
        "group.id": "g",
        "group.protocol": "classic",
        "partition.assignment.strategy": "cooperative-sticky",
        "enable.auto.commit": "false",
        "auto.offset.reset": "latest",
        "session.timeout.ms": "6000",
        "heartbeat.interval.ms": "200",
        "max.poll.interval.ms": "30000",
        "allow.auto.create.topics": "false",
    }
    given().common_options()["client.id"] = "changed"
    assert config.common_options()["client.id"] == "me"


def test_the_clients_take_the_options() -> None:
    config = given(base_kafka_config={"bootstrap.servers": "127.0.0.1:1"}, logging={"level": "error"})
    Producer(config.producer_options())
    Producer(config.common_options())
    AdminClient(config.common_options())
    Consumer(config.consumer_options()).close()


def test_librdkafka_is_asked_about_every_option(capfd: pytest.CaptureFixture[str]) -> None:
    config = given(
        base_kafka_config={
            "bootstrap.servers": "127.0.0.1:1",
            "sasl.pasword": "hunter2",
            "debug": "hunter",
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": "PLAIN",
            "sasl.username": "u",
            "sasl.password": "hunter",
        },
        producer_kafka_config={"lingr.ms": 1, "compression.type": "zip"},
    )
    found = check_clients(config)
    assert sorted(problem.path for problem in found) == [
        'base_kafka_config."debug"',
        'base_kafka_config."sasl.pasword"',
        'producer_kafka_config."compression.type"',
        'producer_kafka_config."lingr.ms"',
    ]
    assert "hunter" not in "".join(map(str, found))
    assert check_clients(given()) == []
    assert capfd.readouterr() == ("", "")


# --- secrets


def test_nothing_that_is_printed_holds_a_secret() -> None:
    config = given(
        data_source="postgresql://u:hunter2@h/db",
        base_kafka_config={"sasl.password": "hunter2", "ssl.key.pem": "hunter2"},
        producer_kafka_config={"sasl.oauthbearer.client.secret": "hunter2"},
    )
    from rich.pretty import pretty_repr

    for text in (repr(config), str(config), f"{config}", pretty_repr(config), str(config.masked())):
        assert "hunter2" not in text
        assert "***" in text
    assert "hunter2" in config.dsn
    assert config.producer_options()["sasl.password"] == "hunter2"


def test_a_traceback_of_a_configuration_error_holds_no_secret() -> None:
    with pytest.raises(ConfigurationError) as caught:
        given(data_source="host=a password='hunter2", limits={"shards": 0}, base_kafka_config={"sasl.password": []})
    error = caught.value
    assert error.__cause__ is None, "the cause holds the input"
    text = "".join(traceback.format_exception(error)) + repr(error) + str(error.__context__)
    assert "limits.shards" in text
    assert "hunter2" not in "\n".join(line for line in text.splitlines() if "given(" not in line)


# --- loading


def test_where_the_file_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load(None, [GROUP], {}).source is None
    write(tmp_path / "harvester.toml", 'leader_group_id = "here"')
    named = write(tmp_path / "named.toml", 'leader_group_id = "named"')
    other = write(tmp_path / "other.toml", 'leader_group_id = "other"')
    assert load_config(None, (), {}).leader_group_id == "here"
    assert load_config(None, (), {"HARVESTER_CONFIG": str(named)}).leader_group_id == "named"
    assert load_config(other, (), {"HARVESTER_CONFIG": str(named)}).leader_group_id == "other"
    assert load_config(other, [GROUP], {}).leader_group_id == "g"


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (None, "cannot be read"),
        (b"a = ", "not valid TOML"),
        (b"\xff\xfe", "UTF-8"),
        (b"a = 1\na = 2", "not valid TOML"),
        (b"x = " + b"[" * 20_000, "not valid TOML"),
    ],
)
def test_a_file_that_cannot_be_read(tmp_path: Path, content: bytes | None, part: str) -> None:
    path = tmp_path / "x.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigurationError) as caught:
        load_config(path)
    assert part in str(caught.value)
    assert str(path) in str(caught.value)


def test_everything_that_is_wrong_is_listed_at_once(tmp_path: Path) -> None:
    path = write(
        tmp_path / "c.toml",
        """
        name = "${MISSING}"
        datasource = "x"
        [limits]
        shards = 1000
        mark_backoff = "2s"
        [producer_kafka_config]
        delivery.timeout.ms = 10000
        """,
    )
    with pytest.raises(ConfigurationError) as caught:
        load_config(path, ["zzz=1", "oops"], {})
    assert sorted(problem.path for problem in caught.value.problems) == [
        "--set",
        "datasource",
        "leader_group_id",
        "limits.drain_interval",
        "limits.mark_backoff_max",
        "limits.session_timeout",
        "limits.shards",
        "name",
        "zzz",
    ]
    assert caught.value.exit_code == ExitCode.CONFIGURATION
    assert str(path) in str(caught.value)


def test_rules_are_not_judged_on_values_that_were_not_meant() -> None:
    # session_timeout is below the default heartbeat_timeout, but another one was meant
    for wrong in ("limits.heartbeat_timeout=1", "limits.heartbeat_timout=1.5s", "heartbeat_timeout=1.5s"):
        with pytest.raises(ConfigurationError) as caught:
            load_config(None, [GROUP, wrong, "limits.session_timeout=4s"], {})
        assert len(caught.value.problems) == 1, wrong


def test_an_unset_variable_is_the_only_problem_of_its_setting() -> None:
    overrides = [GROUP, "data_source=${A}", "limits.shards=${B}", "base_kafka_config.max.poll.interval.ms=${C}"]
    with pytest.raises(ConfigurationError) as caught:
        load_config(None, overrides, {})
    assert all("is not set" in problem.message for problem in caught.value.problems)
    assert len(caught.value.problems) == 3


@pytest.mark.parametrize(
    ("settings", "path", "part"),
    [
        ({"poison": {"policy": "drop"}}, "poison.policy", "quarantine, hold, stop"),
        ({"poison": {"notice_topic": "a b"}}, "poison.notice_topic", "not a Kafka topic name"),
        ({"poison": {"notice_topic": "g.neli"}}, "poison.notice_topic", "is the leader topic"),
        ({"poison": {"notice": "x"}}, "poison.notice", "did you mean 'notice_topic'"),
        ({"poison": "hold"}, "poison", "must be a table"),
        ({"policy": "hold"}, "policy", "did you mean 'poison.policy'"),
        ({"archive": "all"}, "archive", "off, ids, rows"),
        ({"archive": True}, "archive", "must be text"),
        ({"archive_retention": "7"}, "archive_retention", "no unit"),
        ({"archive_retention": "0d"}, "archive_retention", "out of range"),
        ({"archive_retention": "3651d"}, "archive_retention", "up to 3650d"),
        ({"marking": "disk"}, "marking", "memory, table"),
    ],
)
def test_poison_and_archive_are_judged(settings: dict[str, Any], path: str, part: str) -> None:
    assert part in problems_of(settings)[path]


STORE = {"policy": "claim-check", "store": "s3://bucket/prefix/"}


@pytest.mark.parametrize(
    ("oversize", "path", "part"),
    [
        ({"policy": "claim-check"}, "oversize.store", "is not set"),
        ({"policy": "drop"}, "oversize.policy", "quarantine, claim-check"),
        ({"store": "/srv/values"}, "oversize.store", "file:///directory"),
        ({"store": "s3://bucket", "s3_endpoint": "minio:9000"}, "oversize.s3_endpoint", "address of a server"),
        ({"store": "s3://bucket", "s3_endpoint": "http://user@minio"}, "oversize.s3_endpoint", "address of a server"),
        ({"store": "s3://bucket", "s3_region": "a b"}, "oversize.s3_region", "region"),
        ({**STORE, "above": 998_977}, "oversize.above", "at most 998976"),
        ({**STORE, "above": -1}, "oversize.above", "out of range"),
    ],
)
def test_what_is_too_large_has_a_store_and_a_limit_below_the_producers(
    oversize: dict[str, Any], path: str, part: str
) -> None:
    assert part in problems_of({"oversize": oversize})[path]


def test_the_limit_of_what_is_put_away_follows_from_the_producers() -> None:
    assert given(oversize=STORE | {"above": "998976"}).oversize.store_settings == StoreSettings("s3://bucket/prefix")
    for options, limit in (
        ({"producer_kafka_config": {"message.max.bytes": 5_000_000}}, 4_998_976),
        ({"base_kafka_config": {"message.max.bytes": 2_000}}, 976),
        ({"base_kafka_config": {"message.max.bytes": 1_000}}, 1),
        ({"base_kafka_config": {"message.max.bytes": "many"}}, 998_976),
    ):
        (spec, *_) = shard_specs(given(oversize=STORE, **options))
        assert spec.oversize == PutAwaySettings(StoreSettings("s3://bucket/prefix"), limit)
    (spec, *_) = shard_specs(given(oversize=STORE | {"above": 7}))
    assert spec.oversize is not None
    assert spec.oversize.above == 7
    (spec, *_) = shard_specs(given(oversize={"store": "s3://bucket"}))  # consumers may read it still
    assert spec.oversize is None


def test_poison_and_archive_are_read_from_overrides() -> None:
    overrides = [GROUP, "archive=off", "archive=ids", "archive_retention=30d", "poison.policy=HOLD"]
    config = load_config(None, [*overrides, "poison.notice_topic=notices"], {})
    assert (config.archive, config.archive_retention) == ("ids", timedelta(days=30))
    assert config.poison == PoisonSettings(policy="hold", notice_topic="notices")


# --- the sample and the page


def _commented_settings(text: str) -> str:
    return re.sub(r"^# (?=[a-z0-9_]+ = )", "", text, flags=re.MULTILINE)


def test_the_sample_holds_every_setting_with_its_default() -> None:
    text = (ROOT / "sample-config.toml").read_text()
    plain, full = tomllib.loads(text), tomllib.loads(_commented_settings(text))
    # as it stands it changes nothing
    sample = Config(**(plain | {"leader_group_id": "harvester", "name": "x"}))
    assert sample == Config(leader_group_id="harvester", name="x")
    # nothing is missing, and what is commented out is the default as well
    assert set(full) == set(Config.model_fields), "sample-config.toml"
    for table, kind in Config.tables().items():
        assert set(full[table]) == set(kind.model_fields), f"sample-config.toml, [{table}]"
    assert Config(**(full | {"name": "x"})) == sample
    for name, value in full["limits"].items():
        default = getattr(sample.limits, name)
        assert value == (default if isinstance(default, int) else format_duration(default)), name
    derived = {name for kind in (Config, Limits) for name, field in kind.model_fields.items() if field.description}
    assert {name for name in [*full, *full["limits"]] if name not in [*plain, *plain["limits"]]} == derived


def test_every_setting_of_the_sample_is_explained() -> None:
    lines = (ROOT / "sample-config.toml").read_text().splitlines()
    for number, line in enumerate(lines):
        if re.match(r"(# )?[a-z0-9_]+ = ", line):
            assert lines[number - 1].startswith("# "), f"sample-config.toml: no comment above {line!r}"


def test_the_page_names_every_setting_and_its_default() -> None:
    page = (ROOT / "docs/configuration.md").read_text()
    rows = dict(re.findall(r"^\| `([a-z0-9_.]+)` \| (.+?) \|", page.partition("## Settings")[2], re.MULTILINE))
    tables = Config.tables()
    fields = [name for name in Config.model_fields if name not in tables]
    fields += [f"{table}.{name}" for table, kind in tables.items() for name in kind.model_fields]
    rows = {name: default for name, default in rows.items() if name in fields or name.startswith(tuple(tables))}
    assert list(rows) == fields, "docs/configuration.md, Settings: one row for each setting, in the model's order"
    described = {
        "base_kafka_config": '`{"bootstrap.servers": "localhost:9092"}`',
        "producer_kafka_config": "`{}`",
        "leader_group_id": "the main script's name",
        "leader_topic": "`leader_group_id` + `.neli`",
        "name": "`{hostname}_{pid}_{unix time}`",
        "limits.session_timeout": "2 × `heartbeat_timeout`, or 3 s more than it",
        "limits.drain_interval": "`session_timeout` − `heartbeat_timeout` − 500 ms, at most `queue_timeout`",
        "oversize.store": "none",
        "oversize.s3_endpoint": "none",
        "oversize.s3_region": "none",
        "poison.notice_topic": "none",
        "tracing.enabled": "`false`",
        "oauth.token": "none",
    }
    config = given()
    for path, shown in rows.items():
        table, _, name = path.rpartition(".")
        value = getattr(getattr(config, table) if table else config, name)
        text = format_duration(value) if isinstance(value, timedelta) else value
        assert shown == described.get(path, f"`{text}`"), path


def test_the_pages_example_is_valid() -> None:
    page = (ROOT / "docs/configuration.md").read_text()
    examples = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    assert examples
    for example in examples:
        assert given(**tomllib.loads(example)).delivery_timeout == ms(10_000)


def test_a_problem_reads_as_one_line() -> None:
    assert str(Problem("a.b", "is wrong", "x or y")) == "a.b: is wrong (allowed: x or y)"
