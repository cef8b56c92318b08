"""Secrets among Kafka options."""

from __future__ import annotations

import pytest

from harvester.config.kafka_options import MASK, is_secret, mask_options, scrub


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
