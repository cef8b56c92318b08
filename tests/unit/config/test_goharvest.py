"""A configuration of goharvest as one of ours."""

from __future__ import annotations

import tomllib
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from harvester_cli.config import app
from psycopg.conninfo import conninfo_to_dict
from typer.testing import CliRunner

from harvester.config import Config, load_config
from harvester.config.describe import to_toml
from harvester.config.dsn import parse_dsn
from harvester.config.goharvest import Imported, convert, data_source, duration, level
from harvester.errors import ConfigurationError, HarvesterError

# As in goharvest's user guide.
REAPER = """
harvest:
  baseKafkaConfig:
    bootstrap.servers: localhost:9092
  producerKafkaConfig:
    compression.type: lz4
    delivery.timeout.ms: 10000
  leaderTopic: my-app-name
  leaderGroupID: my-app-name
  dataSource: host=localhost port=5432 user=postgres password= dbname=postgres sslmode=disable
  outboxTable: outbox
  limits:
    minPollInterval: 1s
    heartbeatTimeout: 5s
    maxInFlightRecords: 1000
    minMetricsInterval: 5s
    sendConcurrency: 4
    sendBuffer: 10
logging:
  level: Debug
"""


def imported(text: str) -> Imported:
    return convert(yaml.safe_load(text))


def harvest(**given: Any) -> Imported:
    return convert({"harvest": {"leaderGroupID": "g", **given}})


def notes(found: Imported) -> dict[str, str]:
    """Without the one on the partitioner, which is always there."""
    always = "harvest.producerKafkaConfig.partitioner"
    assert always in {note.path for note in found.notes}
    return {note.path: note.text for note in found.notes if "CRC32" not in note.text}


def config_of(found: Imported) -> Config:
    return Config(**tomllib.loads(to_toml(found.settings)))


def test_the_example_of_the_guide() -> None:
    found = imported(REAPER)
    assert config_of(found) == Config(
        base_kafka_config={"bootstrap.servers": "localhost:9092"},
        producer_kafka_config={"compression.type": "lz4", "delivery.timeout.ms": "10000"},
        leader_topic="my-app-name",
        leader_group_id="my-app-name",
        data_source="host=localhost port=5432 user=postgres password=dbname=postgres sslmode=disable",
        outbox_table="outbox",
        name=config_of(found).name,
        limits={
            "min_poll_interval": "1s", "heartbeat_timeout": "5s", "max_in_flight_records": 1000,
            "min_metrics_interval": "5s", "shards": 4, "send_buffer": 10,
            "drain_interval": "10.5s", "session_timeout": "16s",
        },
        logging={"level": "debug"},
    )  # fmt: skip
    # A delivery that may take 10 s needs more time when leadership goes.
    assert set(notes(found)) == {
        "harvest.dataSource",
        "harvest.producerKafkaConfig.delivery.timeout.ms",
        "harvest.limits.sendConcurrency",
        "harvest.limits.sendBuffer",
    }


def test_every_setting_of_the_guide_has_a_counterpart() -> None:
    limits = {
        "minPollInterval": "200ms", "heartbeatTimeout": "6s", "queueTimeout": "20s", "markBackoff": "20ms",
        "ioErrorBackoff": "1s", "maxInFlightRecords": 500, "sendConcurrency": 3, "sendBuffer": 7,
        "markQueryRecords": 50, "minMetricsInterval": "9s",
    }  # fmt: skip
    config = config_of(harvest(leaderTopic="t", name="n", outboxTable="a.b", limits=limits))
    assert (config.leader_topic, config.name, str(config.table)) == ("t", "n", '"a"."b"')
    seconds = timedelta(seconds=1)
    given = config.limits
    assert (given.min_poll_interval, given.heartbeat_timeout, given.queue_timeout) == (
        seconds / 5,
        6 * seconds,
        20 * seconds,
    )
    assert (given.mark_backoff, given.io_error_backoff, given.min_metrics_interval) == (
        seconds / 50,
        seconds,
        9 * seconds,
    )
    assert (given.max_in_flight_records, given.shards, given.send_buffer, given.mark_query_records) == (500, 3, 7, 50)


def test_a_group_that_was_not_named_is_that_of_the_program() -> None:
    found = convert({"harvest": {}})
    assert found.settings["leader_group_id"] == "reaper"
    assert config_of(found).leader_topic == "reaper.neli"
    assert "harvest.leaderGroupID" in notes(found)


def test_what_has_no_counterpart_is_noted() -> None:
    found = convert({"harvest": {"leaderGroupID": "g", "fancy": 1, "limits": {"odd": "1s"}}, "extra": {}})
    assert set(notes(found)) == {"harvest.fancy", "harvest.limits.odd", "extra"}
    assert config_of(found).limits == Config(leader_group_id="g").limits


def test_kafka_options_that_guard_or_are_misplaced() -> None:
    found = harvest(
        baseKafkaConfig={"acks": 1, "compression.type": "gzip", "linger.ms": 3, "client.rack": "a"},
        producerKafkaConfig={"enable.idempotence": False, "compression.codec": "lz4", "partitioner": "random"},
    )
    # What was given for all clients and for producers is given once, as for producers.
    assert found.settings["producer_kafka_config"] == {"linger.ms": 3, "compression.codec": "lz4"}
    assert found.settings["base_kafka_config"] == {"client.rack": "a"}
    assert {path.rpartition("Config.")[2] for path in notes(found)} >= {"acks", "enable.idempotence", "partitioner"}
    assert config_of(found).producer_options()["acks"] == "all"


def test_a_dollar_stays_one() -> None:
    found = harvest(dataSource="host=db password=a${b}$$ sslmode=require")
    loaded = tomllib.loads(to_toml(found.settings))
    assert loaded["data_source"] == "host=db password=a$${b}$$$$ sslmode=require"


@pytest.mark.parametrize(
    ("given", "ours"),
    [("1m30s", "90s"), ("1.5h", "90m"), ("100ms", "100ms"), ("250µs", "250us"), ("3000ns", "3us"),
     (5_000_000_000, "5s"), ("2h45m", "165m"), ("1.s", "1s"), ("0", "0s"), (0, "0s"), ("+5s", "5s")],
)  # fmt: skip
def test_durations(given: object, ours: str) -> None:
    assert duration(given) == ours


@pytest.mark.parametrize(
    "given", ["", "+", "5", "5 s", "1d", "-1s", "1ns", True, None, 1.5, "1s1", "23999999976h", "99999999999h", 10**30]
)
def test_what_is_no_duration(given: object) -> None:
    with pytest.raises(ValueError):
        duration(given)


@pytest.mark.parametrize(("given", "ours"), [("Warn", "warning"), ("TRACE", "trace"), ("Info", "info")])
def test_levels(given: str, ours: str) -> None:
    assert level(given) == ours


@pytest.mark.parametrize(
    ("given", "ours", "count"),
    [
        ("host=a sslmode=disable", "host=a sslmode=disable", 0),
        ("host=a", "host=a sslmode=require", 1),
        ("host=a sslmode=", "host=a sslmode=require", 1),
        ("host=a sslmode=''", "host=a sslmode=require", 1),
        # An empty value takes the text behind it, as it does for libpq and for lib/pq.
        ("host=a password= dbname=shop sslmode=disable", "host=a password=dbname=shop sslmode=disable", 1),
        ("host=a sslmode=disable password=", "host=a sslmode=disable password=''", 0),
        ("host=a password='' dbname=shop sslmode=disable", "host=a password='' dbname=shop sslmode=disable", 0),
        (r"host=a password=\'a\ b=c sslmode=disable", r"host=a password='\'a b=c' sslmode=disable", 0),
        ("host = a dbname='x'user=y sslmode=disable", "host=a dbname=x user=y sslmode=disable", 0),
        ("dbname=b sslmode=disable", "host=localhost dbname=b sslmode=disable", 1),
        ("host='' dbname=b sslmode=disable", "host=localhost dbname=b sslmode=disable", 1),
        ("postgres:///b?sslmode=disable", "postgres:///b?host=localhost&sslmode=disable", 1),
        ("postgres://u:p@:5433/b?sslmode=disable", "postgres://u:p@:5433/b?host=localhost&sslmode=disable", 1),
        ("postgres:///b?host=/tmp&sslmode=disable", "postgres:///b?host=/tmp&sslmode=disable", 0),
        ("postgres://a/b", "postgres://a/b?sslmode=require", 1),
        ("postgres://a/b?sslmode=disable", "postgres://a/b?sslmode=disable", 0),
        ("host=a sslmode=disable binary_parameters=yes", "host=a sslmode=disable", 1),
        ("host=a sslmode=disable search_path=x", "host=a sslmode=disable options='-c search_path=x'", 1),
        ("host=a sslmode=disable password='a b'", "host=a sslmode=disable password='a b'", 0),
        ("postgres://a/b?sslmode=disable&binary_parameters=yes", "postgres://a/b?sslmode=disable", 1),
        ("postgres://a?search_path=x,y+z&sslmode=disable",
         "postgres://a?sslmode=disable&options=-c%20search_path%3Dx,y%5C%20z", 1),
        ("postgres://u:sslmode=no@a/b", "postgres://u:sslmode=no@a/b?sslmode=require", 1),
        ("postgres://a/b?sslmode=&sslrootcert=/a%20b.pem", "postgres://a/b?sslrootcert=/a%20b.pem&sslmode=require", 1),
        ("postgres://a/b?sslmode=disable&sslmode=prefer", "postgres://a/b?sslmode=disable", 0),
    ],
)  # fmt: skip
def test_data_sources(given: str, ours: str, count: int) -> None:
    made, noted = data_source(given)
    assert (made, len(noted)) == (ours, count)
    conninfo_to_dict(made)  # libpq takes it


def test_what_an_empty_value_takes_is_noted_and_not_repeated() -> None:
    found = harvest(dataSource="host=a user=app password= dbname=hunter2 sslmode=disable")
    (note,) = [note.text for note in found.notes if note.path == "harvest.dataSource"]
    assert note.startswith("password takes the text after it, up to the next blank, as its value, so dbname is not set")
    assert "hunter2" not in note
    assert parse_dsn(found.settings["data_source"])["password"] == "dbname=hunter2"


@pytest.mark.parametrize("given", ["host=a password='x", "host=a =x y", "host=a password=x\\"])
def test_what_the_driver_of_goharvest_refuses(given: str) -> None:
    with pytest.raises(ValueError):
        data_source(given)


def test_settings_of_the_session_in_a_url_reach_the_server() -> None:
    made, _ = data_source("postgres://a/b?search_path=x,y+z&options=-c%20geqo%3Doff")
    assert conninfo_to_dict(made)["options"] == "-c geqo=off -c search_path=x,y\\ z"


@pytest.mark.parametrize("given", ["host=a hunter2", "postgres://a:hunter2@[b/c"])
def test_a_broken_data_source_is_not_repeated(given: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        harvest(dataSource=given)
    assert "hunter2" not in str(caught.value)


def test_a_key_without_a_value_is_not_given() -> None:
    found = imported("""
harvest:
  baseKafkaConfig:
    client.rack:
    linger: {ms: }
  leaderTopic:
  leaderGroupID: g
  dataSource:
  outboxTable:
  name:
  limits:
    minPollInterval:
    sendBuffer:
logging:
  level:
""")
    assert found == harvest()
    assert found.settings == {"leader_group_id": "g"}


def test_texts_that_are_empty_are_not_given() -> None:
    assert harvest(leaderTopic="", dataSource="", outboxTable="", name="") == harvest()
    assert convert({"harvest": {"leaderGroupID": ""}}).settings["leader_group_id"] == "reaper"


@pytest.mark.parametrize("name", ["off", "Off", "'Off'"])
def test_off_is_a_level_though_it_may_be_false_to_yaml(name: str) -> None:
    found = imported(f"harvest: {{leaderGroupID: g}}\nlogging: {{level: {name}}}")
    assert found.settings["logging"] == {"level": "error"}
    assert "errors are logged" in notes(found)["logging.level"]
    assert "logging.level" not in notes(imported("harvest: {leaderGroupID: g}\nlogging: {level: All}"))


@pytest.mark.parametrize(
    ("limit", "zero", "ours"),
    [
        ("ioErrorBackoff", "0s", timedelta(milliseconds=1)),
        ("markBackoff", 0, timedelta(milliseconds=1)),
        ("minMetricsInterval", "0", timedelta(milliseconds=1)),
        ("sendBuffer", 0, 1),
    ],
)
def test_a_zero_that_is_allowed_there_becomes_the_least_here(limit: str, zero: object, ours: object) -> None:
    found = harvest(limits={limit: zero})
    name = next(name for name in vars(config_of(found).limits) if name.replace("_", "") == limit.lower())
    assert getattr(config_of(found).limits, name) == ours
    assert any("for 0 there" in note.text for note in found.notes if note.path == f"harvest.limits.{limit}")


@pytest.mark.parametrize("limit", ["heartbeatTimeout", "drainInterval", "maxInFlightRecords", "sendConcurrency"])
def test_a_zero_that_is_refused_there_stays_a_problem(limit: str) -> None:
    with pytest.raises(ConfigurationError):
        config_of(harvest(limits={limit: 0}))


@pytest.mark.parametrize("topic", ["my topic", "umläut", "..", "a" * 250, "__consumer_offsets", "__transaction_state"])
def test_a_leader_topic_that_cannot_work_is_left_out(topic: str) -> None:
    found = harvest(leaderTopic=topic)
    assert "leader_topic" not in found.settings
    assert config_of(found).leader_topic == "g.neli"
    assert "omitted" in notes(found)["harvest.leaderTopic"]


@pytest.mark.parametrize("given", ["9" * 25, int("9" * 20), 99_999_999_999, "²"])
def test_a_delivery_timeout_that_is_none_is_left_to_the_check(given: object) -> None:
    found = harvest(producerKafkaConfig={"delivery.timeout.ms": given})
    assert found.settings["producer_kafka_config"] == {"delivery.timeout.ms": given}
    assert "limits" not in found.settings


def test_everything_that_is_wrong_is_told_at_once() -> None:
    with pytest.raises(ConfigurationError) as caught:
        convert({"harvest": {"limits": {"minPollInterval": "soon", "sendBuffer": "x"}, "baseKafkaConfig": 3}})
    assert {problem.path for problem in caught.value.problems} == {
        "harvest.limits.minPollInterval", "harvest.limits.sendBuffer", "harvest.baseKafkaConfig",
    }  # fmt: skip


# --- the command


def test_the_command_writes_a_file_that_loads(tmp_path: Path) -> None:
    source, made = tmp_path / "reaper.yaml", tmp_path / "harvester.toml"
    source.write_text(REAPER)
    result = CliRunner().invoke(app, ["import", str(source), "-o", str(made)])
    assert result.exit_code == 0, result.output
    assert "note: harvest.limits.sendConcurrency" in result.stderr
    assert made.stat().st_mode & 0o777 == 0o600
    assert load_config(made, env={}).limits.shards == 4
    assert made.read_text().startswith("# Imported from goharvest's reaper.yaml.\n# note: ")
    again = CliRunner().invoke(app, ["import", str(source), "-o", str(made)])
    assert isinstance(again.exception, ConfigurationError)


def test_the_command_prints_toml(tmp_path: Path) -> None:
    source = tmp_path / "reaper.yaml"
    source.write_text(REAPER)
    result = CliRunner().invoke(app, ["import", str(source)])
    assert tomllib.loads(result.stdout)["leader_group_id"] == "my-app-name"


@pytest.mark.parametrize(
    "text", ["a: [", "\x00", "just text", "- a", 'harvest: {name: "\\ud800"}', 'harvest: {"\\ud800": 1}']
)
def test_what_is_no_configuration(tmp_path: Path, text: str) -> None:
    source = tmp_path / "reaper.yaml"
    source.write_text(text)
    result = CliRunner().invoke(app, ["import", str(source)])
    assert isinstance(result.exception, HarvesterError)


def test_a_result_that_is_not_right_is_written_and_its_problems_told(tmp_path: Path) -> None:
    source, made = tmp_path / "reaper.yaml", tmp_path / "harvester.toml"
    source.write_text(REAPER.replace("lz4", "lz5").replace("heartbeatTimeout: 5s", "heartbeatTimeout: 3s"))
    result = CliRunner().invoke(app, ["import", str(source), "-o", str(made)])
    assert isinstance(result.exception, ConfigurationError)
    assert "limits.heartbeat_timeout" in str(result.exception)  # four polls of a second do not fit
    assert made.exists()
