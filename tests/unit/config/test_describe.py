"""What the Kafka client refuses, and what differs between two configurations, told without a secret."""

from __future__ import annotations

from datetime import timedelta

import pytest

from harvester.config import Config, Limits, Logging, check_clients
from harvester.config.describe import changes

GIVEN = {"leader_group_id": "billing", "name": "billing-1"}
DSN = "host=db user=app password={} dbname=app"


def config(**given: object) -> Config:
    return Config(**{**GIVEN, **given})  # type: ignore[arg-type]


SCRAM = {"security.protocol": "SASL_SSL", "sasl.mechanism": "SCRAM-SHA-512", "sasl.password": "p-secret"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (SCRAM, "sasl.username and sasl.password must be set"),
        (SCRAM | {"sasl.mechanism": "PLAINN", "sasl.username": "relay"}, "Unsupported SASL mechanism: PLAINN"),
        ({"security.protocol": "sasl_plaintext"}, "No provider for SASL mechanism GSSAPI"),  # the client's default
        ({"security.protocol": "SSL", "ssl.ca.location": "/nowhere/ca.pem"}, "ssl.ca.location failed"),
    ],
)
def test_a_login_that_the_client_refuses_is_told_once(options: dict[str, str], said: str) -> None:
    (problem,) = check_clients(config(base_kafka_config=options))
    assert problem.path == "base_kafka_config"
    assert problem.message.startswith(said)
    assert "secret" not in str(problem)


def test_logins_that_the_client_accepts() -> None:
    assert check_clients(config(base_kafka_config=SCRAM | {"sasl.username": "relay"})) == []
    token = {"security.protocol": "SASL_SSL", "sasl.mechanism": "OAUTHBEARER"}
    by_http = {"sasl.oauthbearer.method": "oidc", "sasl.oauthbearer.token.endpoint.url": "http://127.0.0.1:1",
               "sasl.oauthbearer.client.id": "c", "sasl.oauthbearer.client.secret": "s"}  # fmt: skip
    assert check_clients(config(base_kafka_config=token)) == []
    assert check_clients(config(base_kafka_config=token | by_http)) == []


def test_nothing_differs() -> None:
    assert changes(config(), config()) == []


def test_live_settings_are_told_from_others() -> None:
    found = changes(config(), config(limits=Limits(shards=4, max_attempts=9), logging=Logging(level="debug")))
    assert {change.path: change.live for change in found} == {
        "limits.shards": True,
        "limits.max_attempts": False,
        "logging.level": True,
    }
    assert sorted(map(str, found)) == [
        "limits.max_attempts: 5 -> 9",
        "limits.shards: 8 -> 4",
        "logging.level: 'info' -> 'debug'",
    ]


def test_what_follows_from_a_setting_is_named_too() -> None:
    found = changes(config(), config(limits=Limits(heartbeat_timeout=timedelta(seconds=6))))
    assert {change.path for change in found} >= {"limits.heartbeat_timeout", "limits.session_timeout"}


def test_secrets_differ_without_being_told() -> None:
    before = config(data_source=DSN.format("one-secret"), base_kafka_config={"sasl.password": "two-secret"})
    after = config(data_source=DSN.format("three-secret"), base_kafka_config={"sasl.password": "four-secret"})
    found = changes(before, after)
    assert [str(change) for change in found] == [
        "base_kafka_config.sasl.password: a secret in it",
        "data_source: a secret in it",
    ]
    assert "secret'" not in repr(found)
    assert all(change.live for change in found)


def test_a_password_alone_can_be_taken_over() -> None:
    before = config(data_source=DSN.format("one"))
    for other, live in ((DSN.format("two"), True), (DSN.format("two").replace("user=app", "user=root"), False)):
        (change,) = changes(before, config(data_source=other))
        assert change.live is live
    (change,) = changes(before, config(data_source=DSN.format("one"), base_kafka_config={"sasl.password": "new"}))
    assert not change.live  # there was none: that is another way to connect


def test_a_host_is_told_and_its_password_is_not() -> None:
    before = config(data_source=DSN.format("one-secret"))
    after = config(data_source=DSN.format("two-secret").replace("host=db", "host=db2"))
    (change,) = changes(before, after)
    assert "host=db2" in str(change)
    assert "-secret" not in str(change)


def test_options_that_come_and_go() -> None:
    found = changes(config(producer_kafka_config={"linger.ms": 5}), config(producer_kafka_config={"batch.size": 9}))
    assert [str(change) for change in found] == [
        "producer_kafka_config.linger.ms: '5' -> (not given)",
        "producer_kafka_config.batch.size: (not given) -> '9'",
    ]
