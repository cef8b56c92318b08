"""Secrets among Kafka options, and names that the client can report."""

from __future__ import annotations

import json
import time

import pytest
from confluent_kafka import Consumer

from harvester.config import Config
from harvester.config.kafka_options import MASK, Table, is_secret, mask_options, read_options, scrub
from harvester.neli.reach import Membership
from harvester.telemetry.logging import ClientLog


@pytest.mark.parametrize(
    "option",
    [
        "sasl.password",
        "ssl.key.password",
        "ssl.key.pem",
        "ssl.keystore.password",
        "sasl.oauthbearer.client.secret",
        "sasl.oauthbearer.client.credentials.client.secret",
        "sasl.oauthbearer.assertion.private.key.passphrase",
        "sasl.oauthbearer.assertion.private.key.pem",
        "sasl.oauthbearer.config",
        "sasl.username",
        "SASL.PASSWORD",
    ],
)
def test_secret_options_are_masked(option: str) -> None:
    assert mask_options({option: "hunter2"}) == {option: MASK}
    assert scrub("bad hunter2!", {option: "hunter2"}) == f"bad {MASK}!"


@pytest.mark.parametrize(
    "option", ["bootstrap.servers", "ssl.key.location", "ssl.ca.location", "client.id", "linger.ms", "sasl.mechanisms"]
)
def test_other_options_are_shown(option: str) -> None:
    assert not is_secret(option)


def test_a_login_in_a_url_is_masked() -> None:
    shown = mask_options({"sasl.oauthbearer.token.endpoint.url": "https://me:hunter2@auth/x"})
    assert shown == {"sasl.oauthbearer.token.endpoint.url": f"https://{MASK}@auth/x"}


@pytest.mark.parametrize("name", ['billing "eu"', "back\\slash", "é" * 100, "a" + "é" * 64, "n" * 200], ids=ascii)
def test_no_name_of_a_process_makes_its_client_unreadable(name: str) -> None:
    """The client's statistics and its log hold it."""
    config = Config(name=name, leader_group_id="g", base_kafka_config={"bootstrap.servers": "127.0.0.1:1"})
    membership, lines = Membership("g", 6.0), list[str]()
    heard: list[str] = []

    def read(statistics: str) -> None:
        heard.append(statistics)
        membership.read(json.loads(statistics), 0.0)

    consumer = Consumer(
        {
            **config.consumer_options(),
            "logger": ClientLog(lambda _, text: lines.append(text)),
            "statistics.interval.ms": 50,
            "stats_cb": read,
        }
    )
    try:
        consumer.subscribe(["t"])
        deadline = time.monotonic() + 20
        while not (heard and lines) and time.monotonic() < deadline:
            consumer.poll(0.05)
    finally:
        consumer.close()
    assert heard, "no statistics came"
    assert lines, "the client has logged nothing"


@pytest.mark.parametrize("table", ["base_kafka_config", "producer_kafka_config"])
@pytest.mark.parametrize("client_id", ['billing "eu"', "back\\slash", "é" * 51, "a\nb"], ids=ascii)
def test_a_client_id_that_makes_the_client_unreadable_is_refused(client_id: str, table: Table) -> None:
    options, problems = read_options({"client.id": client_id}, table)
    assert not options
    assert [problem.path for problem in problems] == [f'{table}."client.id"']


@pytest.mark.parametrize("client_id", ["billing-eu", "Büro 1/3", "é" * 50, "n" * 200])
def test_other_client_ids_are_taken(client_id: str) -> None:
    assert read_options({"client.id": client_id}, "base_kafka_config") == ({"client.id": client_id}, [])
