"""The function that gives tokens: its name in the configuration, how it travels, and what becomes of its failures."""

from __future__ import annotations

import pickle
import time
from pathlib import Path
from typing import Any

import pytest

from harvester.config import Config
from harvester.config.oauth import TokenHook
from harvester.errors import ConfigurationError

OAUTH = {"bootstrap.servers": "h:1", "sasl.mechanism": "OAUTHBEARER", "security.protocol": "sasl_ssl"}
NAME = "tests.support.tokens:unsecured"


def config(**given: Any) -> Config:
    return Config(**{"leader_group_id": "g", "base_kafka_config": OAUTH, "oauth": {"token": NAME}, **given})


def test_every_client_gets_it_and_no_other() -> None:
    with_hook = config()
    for options in (
        with_hook.common_options(), with_hook.producer_options(), with_hook.lane_options(), with_hook.consumer_options()
    ):  # fmt: skip
        assert isinstance(options["oauth_cb"], TokenHook)
    assert "oauth_cb" not in config(oauth={}).common_options()


def test_it_travels_by_name(tmp_path: Path) -> None:
    user = tmp_path / "user"
    user.write_text("somebody")
    arrived = pickle.loads(pickle.dumps(config().producer_options()))["oauth_cb"]
    assert arrived == NAME
    token, expires = arrived(str(user))
    assert token.count(".") == 2
    assert expires > time.time()


def test_the_last_token_goes_on_while_it_is_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user, hook = tmp_path / "user", TokenHook.of(NAME)
    monkeypatch.setattr("harvester.config.oauth._last", {})
    user.write_text("")
    assert hook(str(user))[0] == "no-token", "the client is born, and the broker refuses it"
    user.write_text("somebody")
    good = hook(str(user))
    user.write_text("")
    assert hook(str(user)) == good
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 3600)
    assert hook(str(user))[0] == "no-token"


def test_an_expired_token_is_none() -> None:
    assert TokenHook.of("tests.support.tokens:expired")(None)[0] == "no-token"


@pytest.mark.parametrize(
    "name", ["nowhere.at.all:f", "tests.support.tokens:missing", "tests.support.tokens:NOT_CALLABLE"]
)
def test_what_cannot_be_called(name: str) -> None:
    with pytest.raises(ConfigurationError, match="cannot be used") as caught:
        config(oauth={"token": name}).common_options()
    assert "PYTHONPATH" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("given", "path", "says"),
    [
        ({"oauth": {"token": "no colon"}}, "oauth.token", "does not name a function"),
        ({"oauth": {"token": 7}}, "oauth.token", "does not name a function"),
        ({"base_kafka_config": {"bootstrap.servers": "h:1"}}, "oauth.token", "requires SASL OAUTHBEARER"),
        ({"base_kafka_config": {**OAUTH, "security.protocol": "ssl"}}, "oauth.token", "requires SASL OAUTHBEARER"),
        ({"base_kafka_config": {**OAUTH, "oauth_cb": "x"}}, 'base_kafka_config."oauth_cb"', "set oauth.token instead"),
    ],
)
def test_what_is_wrong(given: dict[str, Any], path: str, says: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        config(**given)
    (problem,) = caught.value.problems
    assert problem.path == path
    assert says in problem.message
