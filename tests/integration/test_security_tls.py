"""The real command through TLS and passwords to both servers; and where none of its secrets may turn up."""

from __future__ import annotations

import json
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    NewTopic,
    ResourcePatternType,
    ResourceType,
)
from psycopg import sql

from harvester import Stasher
from harvester.record import OutboxRecord
from tests.support.canaries import DATABASE, KAFKA, KEY, environment, leaks, process_list
from tests.support.cli import RunningCli, run_cli
from tests.support.consuming import by_key, read_topic
from tests.support.harvesting import LIMITS, _toml, shards_of
from tests.support.tls import Login, SecureServers, secure_servers, set_kafka_password
from tests.support.wait import eventually

ENDED_BY_US = 0


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureServers]:
    directory = tmp_path_factory.mktemp("secure")
    with secure_servers(directory, Login("relay", DATABASE, KAFKA, KEY)) as servers:
        yield servers


class Place:
    """A configuration file of its own for each case, and records to move."""

    def __init__(self, secure: SecureServers, directory: Path, topic: str) -> None:
        self.secure, self.directory, self.topic = secure, directory, topic

    def config(self, *, data_source: str | None = None, **kafka: str) -> str:
        path = self.directory / "harvester.toml"
        settings: dict[str, Any] = {
            "base_kafka_config": self.secure.kafka(**kafka),
            "data_source": data_source or self.secure.data_source(),
            "leader_group_id": self.topic,
            "name": "secure",
            "limits": LIMITS,
        }
        path.write_text(_toml(settings))
        return str(path)

    def add(self, *values: str) -> None:
        with psycopg.connect(self.secure.admin_dsn, autocommit=True) as connection:
            Stasher().stash_many(connection, [OutboxRecord(self.topic, "k", value) for value in values])

    def left(self) -> int:
        with psycopg.connect(self.secure.admin_dsn) as connection:
            row = connection.execute("SELECT count(*) FROM outbox").fetchone()
            assert row is not None
            return int(row[0])

    def published(self) -> dict[str | None, list[str | None]]:
        return by_key(read_topic(self.secure.admin_bootstrap, self.topic))

    def sessions(self) -> list[tuple[str, bool]]:
        """(user, encrypted) of the harvester's sessions."""
        with psycopg.connect(self.secure.admin_dsn) as connection:
            return connection.execute(
                "SELECT DISTINCT usename, ssl FROM pg_stat_activity JOIN pg_stat_ssl USING (pid) WHERE usename = %s",
                (self.secure.login.user,),
            ).fetchall()


@pytest.fixture
def place(secure: SecureServers, tmp_path: Path) -> Iterator[Place]:
    topic = f"test-{tmp_path.name[:60]}"
    admin = AdminClient({"bootstrap.servers": secure.admin_bootstrap, "broker.address.family": "v4"})
    admin.create_topics([NewTopic(topic, 2)])[topic].result(30)
    yield Place(secure, tmp_path, topic)
    with psycopg.connect(secure.admin_dsn, autocommit=True) as connection:
        connection.execute("TRUNCATE outbox")
        connection.execute("UPDATE outbox_term SET leader_group = NULL, progress_topic = NULL")  # a group for each


def test_records_pass_through_tls_and_no_secret_comes_out(place: Place) -> None:
    """At the most talkative: our own trace level, and every debug line that the Kafka client knows."""
    values = [str(number) for number in range(200)]
    place.add(*values)
    config = place.config(debug="all")
    with RunningCli("start", "-f", config, "--log-level", "trace") as running:
        eventually(lambda: place.left() == 0, 60, "an empty outbox")
        assert place.sessions() == [("relay", True)]
        shards = shards_of(running.pid)
        assert len(shards) == 2
        assert leaks(process_list()) == []
        assert [leaks(environment(pid)) for pid in (running.pid, *shards)] == [[], [], []]
        assert leaks(_activity(place.secure)) == []
        assert running.stop() == ENDED_BY_US
    assert place.published() == {"k": values}
    assert "[redacted]" in running.output, "the client has printed its configuration"
    assert leaks(running.output) == []
    assert leaks(_heartbeats(place)) == []


def test_who_may_not_write_to_the_leader_topic_is_told_and_leads_once_it_may(place: Place) -> None:
    admin = AdminClient({"bootstrap.servers": place.secure.admin_bootstrap, "broker.address.family": "v4"})
    leaders = f"{place.topic}.neli"

    def allow(operation: AclOperation) -> None:
        (done,) = admin.create_acls([
            AclBinding(
                ResourceType.TOPIC, leaders, ResourcePatternType.LITERAL,
                "User:relay", "*", operation, AclPermissionType.ALLOW,
            )
        ]).values()  # fmt: skip
        done.result(30)

    admin.create_topics([NewTopic(leaders, 1)])[leaders].result(30)
    allow(AclOperation.READ)  # and so nothing else
    place.add("value")
    said = f"the leader topic '{leaders}' accepts no heartbeats, so nobody can lead"
    with RunningCli("start", "-f", place.config()) as running:
        eventually(lambda: said in running.output, 60, "a refused heartbeat")
        assert place.left() == 1
        allow(AclOperation.WRITE)
        eventually(lambda: place.left() == 0, 60, "an empty outbox")
        assert running.stop() == ENDED_BY_US
    (line,) = (json.loads(line) for line in running.output.splitlines() if said in line)
    assert line["level"] == "error"
    assert line["message"].endswith("allow this user to write to the topic")
    assert place.published() == {"k": ["value"]}


def test_a_topic_that_may_only_be_read_costs_its_own_records(place: Place) -> None:
    """Exactly once, the coordinator refuses the whole transaction because of it."""
    admin = AdminClient({"bootstrap.servers": place.secure.admin_bootstrap, "broker.address.family": "v4"})
    denied = f"{place.topic}-denied"
    admin.create_topics([NewTopic(denied, 1)])[denied].result(30)
    read = AclBinding(
        ResourceType.TOPIC, denied, ResourcePatternType.LITERAL,
        "User:relay", "*", AclOperation.READ, AclPermissionType.ALLOW,
    )  # fmt: skip
    admin.create_acls([read])[read].result(30)
    place.add("1")
    with psycopg.connect(place.secure.admin_dsn, autocommit=True) as connection:
        Stasher().stash_many(connection, [OutboxRecord(denied, "denied", "1"), OutboxRecord(place.topic, "k", "2")])
        with RunningCli(
            "start", "-f", place.config(), "--set", "delivery=exactly-once", "--set", "limits.max_attempts=2"
        ) as running:
            eventually(lambda: place.left() == 0, 60, "an empty outbox")
            assert running.stop() == ENDED_BY_US
        (error,) = connection.execute("DELETE FROM outbox_quarantine RETURNING error").fetchall()
    assert "TOPIC_AUTHORIZATION_FAILED" in error[0]
    assert place.published() == {"k": ["1", "2"]}


def _activity(secure: SecureServers) -> str:
    with psycopg.connect(secure.admin_dsn) as connection:
        return str(connection.execute("SELECT application_name, query FROM pg_stat_activity").fetchall())


def _heartbeats(place: Place) -> str:
    published = read_topic(place.secure.admin_bootstrap, f"{place.topic}.neli")
    assert published
    return str(published)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"data_source": {"password": "Canary-that-is-wrong"}}, "password authentication failed for user"),
        ({"data_source": {"sslrootcert": "other"}}, "certificate verify failed"),
        ({"data_source": {"host": "localhost", "hostaddr": "127.0.0.1", "sslmode": "disable"}}, "no encryption"),
        ({"kafka": {"sasl_password": "Canary-that-is-wrong"}}, "cannot be used: .*invalid credentials"),
        ({"kafka": {"ssl_ca_location": "other"}}, "cannot be used: .*certificate verify failed"),
    ],
    ids=["database password", "database certificate", "no encryption", "kafka password", "kafka certificate"],
)
def test_what_is_wrong_is_said_and_waited_for(place: Place, wrong: dict[str, dict[str, str]], reason: str) -> None:
    given = {
        what: {name: str(place.secure.other_ca) if value == "other" else value for name, value in each.items()}
        for what, each in wrong.items()
    }
    place.add("one")
    data_source = place.secure.data_source(**given.get("data_source", {}))
    config = place.config(data_source=data_source, **given.get("kafka", {}))
    with RunningCli("start", "-f", config, "--log-level", "trace") as running:
        running.wait_for_line(f'"level": "warning".*(database|group): .*{reason}')
        assert leaks(process_list()) == []
        assert running.stop() == ENDED_BY_US
    assert "Traceback" not in running.output
    assert leaks(running.output, (DATABASE, KAFKA, KEY, "Canary-that-is-wrong")) == []
    assert place.left() == 1


def test_it_is_not_ready_before_kafka_lets_it_in(place: Place) -> None:
    """A rolling update with a wrong password stops at the first one; the right one, reloaded, makes it ready."""
    place.add("one")
    config = place.config(sasl_password="Canary-that-is-wrong")
    with RunningCli("start", "-f", config, "--set", "http.listen=127.0.0.1:0", session=True) as running:
        url = running.wait_for_line(r"serving (http://127\.0\.0\.1:\d+)/")[1]
        eventually(lambda: "invalid credentials" in _readiness(url)[1], 60, "the refusal")
        assert {_readiness(url)[0] for _ in range(50)} == {503}
        assert place.left() == 1
        place.config()
        running.process.send_signal(signal.SIGHUP)
        eventually(lambda: _readiness(url) == (200, "leading\n"), 60, "readiness with the right password")
        eventually(lambda: place.left() == 0, 60, "an empty outbox")
        assert running.stop() == ENDED_BY_US


def _readiness(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"{url}/readyz", timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_other_commands_say_it_too(place: Place) -> None:
    wrong = place.secure.data_source(password="Canary-that-is-wrong")
    status = run_cli("status", "-f", place.config(data_source=wrong), check=False)
    assert (status.returncode, status.stdout) == (69, "")
    assert "password authentication failed" in status.stderr
    assert "check user and password in data_source" in status.stderr

    config = place.config(data_source=place.secure.admin_dsn, sasl_password="Canary-that-is-wrong")
    run_cli("pump", "-f", config, "--records", "3", "--topic", place.topic)
    verify = run_cli("verify", "-f", config, "--topic", place.topic, "--timeout", "5", check=False)
    assert verify.returncode == 69
    assert "invalid credentials" in verify.stderr

    check = run_cli("config", "check", "-f", place.config(ssl_key_password="Canary-that-is-wrong"), check=False)
    assert check.returncode == 78
    assert "ssl.key.location failed" in check.stderr
    for done in (status, verify, check):
        assert leaks(done.stdout + done.stderr, (DATABASE, KAFKA, KEY, "Canary-that-is-wrong")) == []
        assert "Traceback" not in done.stderr


def test_commands_that_print_what_is_configured(place: Place) -> None:
    config = place.config()
    for arguments in (
        ("status",), ("status", "--json"), ("config", "show"), ("config", "show", "--json"), ("config", "check"),
        ("config", "check", "--json"), ("grants", "--relay", "relay"), ("init", "--print"),
    ):  # fmt: skip
        done = run_cli(*arguments, "-f", config)
        assert leaks(done.stdout + done.stderr) == [], arguments
    shown = json.loads(run_cli("config", "show", "--json", "-f", config).stdout)["settings"]
    assert shown["base_kafka_config"]["sasl.password"] == "***"
    assert "password=***" in shown["data_source"]


def test_a_shard_that_breaks(place: Place) -> None:
    """Its traceback is printed, for whoever has to find out why; what it was told is not."""
    env = {"HARVESTER_TEST_HOOKS": f"{__name__}:Breaking", "PYTHONPATH": str(Path(__file__).parents[2])}
    config = place.config()
    running = run_cli("start", "-f", config, "--set", "limits.restart_budget=1", "--log-level", "trace", env=env,
                      check=False)  # fmt: skip
    assert running.returncode == 71
    assert "broken by the test" in running.stderr
    assert leaks(running.stdout + running.stderr) == []


@pytest.mark.parametrize("delivery", ["at-least-once", "exactly-once"])
def test_new_passwords_after_a_reload(delivery: str, place: Place) -> None:
    """Sessions that are made from then on use them, in every process; a shard that is added knows no others."""
    secure, keys = place.secure, [f"k{number}" for number in range(60)]
    new_database, new_kafka = "Canary-database-of-tomorrow", "Canary-kafka-of-tomorrow"

    def add(value: str) -> None:
        with psycopg.connect(secure.admin_dsn, autocommit=True) as connection:
            Stasher().stash_many(connection, [OutboxRecord(place.topic, key, value) for key in keys])

    try:
        with RunningCli("start", "-f", place.config(), "--set", f"delivery={delivery}", session=True) as running:
            add("1")
            eventually(lambda: place.left() == 0, 60, "an empty outbox")
            _set_passwords(secure, new_database, new_kafka)
            config = Path(place.config(data_source=secure.data_source(password=new_database), sasl_password=new_kafka))
            config.write_text(config.read_text().replace("shards = 2", "shards = 3"))
            running.process.send_signal(signal.SIGHUP)
            running.wait_for_line("reload: applied: limits.shards: 2 -> 3")
            with psycopg.connect(secure.admin_dsn, autocommit=True) as admin:
                admin.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'relay'")
            add("2")
            eventually(lambda: place.left() == 0, 60, "an empty outbox, with new passwords")
            shards = shards_of(running.pid)
            assert len(shards) == 3
            assert running.stop() == ENDED_BY_US
        assert place.published() == {key: ["1", "2"] for key in keys}
        assert leaks(running.output, (DATABASE, KAFKA, KEY, new_database, new_kafka)) == []
    finally:
        _set_passwords(secure, secure.login.database_password, secure.login.kafka_password)


def _set_passwords(secure: SecureServers, database: str, kafka: str) -> None:
    with psycopg.connect(secure.admin_dsn, autocommit=True) as admin:
        name = sql.Identifier(secure.login.user)
        admin.execute(sql.SQL("ALTER ROLE {} PASSWORD {}").format(name, database))
    set_kafka_password(secure.admin_bootstrap, secure.login.user, kafka)


class Breaking:
    """Hooks under which no shard can start."""

    def hit(self, place: str, **facts: Any) -> None:
        pass

    def producer(self, options: dict[str, Any]) -> Any:
        raise RuntimeError("broken by the test")
