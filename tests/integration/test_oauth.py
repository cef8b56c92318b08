"""SASL OAUTHBEARER with a token function, against a real broker that lets nobody else in."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from harvester.stack import broker_jars, java, kafka
from harvester.stack.stack import free_ports
from tests.support.brokers import another_listener
from tests.support.cli import RunningCli, run_cli
from tests.support.consuming import by_key, read_topic
from tests.support.harvesting import Scene
from tests.support.tokens import unsecured_of

pytest_plugins = ["tests.support.scenes"]
pytestmark = pytest.mark.servers
ROOT = Path(__file__).parents[2]
ENV = {"PYTHONPATH": str(ROOT)}


@dataclass(frozen=True)
class Broker:
    """`bootstrap` takes tokens only, `admin` is an open door for the test itself."""

    admin: str
    bootstrap: str


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    import time

    home = tmp_path_factory.mktemp("broker")
    port, controller, guarded = free_ports(3, [])
    settings = {
        "sasl.enabled.mechanisms": "OAUTHBEARER",
        "oauthbearer.sasl.jaas.config": (
            "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule required;"
        ),
    }
    with another_listener("TOKENS", guarded, "SASL_PLAINTEXT", settings):
        process = kafka.launch(
            home, broker_jars(), java.find(), port=port, controller_port=controller, heap_mb=512, durable=False
        )
    try:
        kafka.wait_ready(process, home, port, time.monotonic() + 120)
        yield Broker(kafka.bootstrap(port), kafka.bootstrap(guarded))
    finally:
        kafka.halt(process, kill=True)


@pytest.fixture
def there(broker: Broker, scene: Scene) -> Scene:
    """The scene's topic, on this broker."""
    client = AdminClient({"bootstrap.servers": broker.admin, "broker.address.family": "v4"})
    client.create_topics([NewTopic(scene.topic, 2, 1)])[scene.topic].result(60)
    scene.add(*((f"k{number % 5}", str(number)) for number in range(50)))
    return scene


def settings(broker: Broker, user: Path, **given: Any) -> dict[str, Any]:
    kafka_config = {
        "bootstrap.servers": broker.bootstrap,
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "OAUTHBEARER",
        "sasl.oauthbearer.config": str(user),
    }
    return {"base_kafka_config": kafka_config, "oauth": {"token": "tests.support.tokens:unsecured"}, **given}


def published(broker: Broker, scene: Scene) -> dict[str | None, list[str | None]]:
    return by_key(read_topic(broker.admin, scene.topic))


@contextmanager
def provider() -> Iterator[tuple[str, list[dict[str, list[str]]]]]:
    """The token endpoint of an OpenID Connect provider that knows one client; its URL, and what it was asked."""
    asked: list[dict[str, list[str]]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
            expected = "Basic " + base64.b64encode(b"harvester:secret").decode()
            known = self.headers.get("Authorization") == expected
            token, _ = unsecured_of("harvester")
            answer = {"access_token": token, "token_type": "Bearer", "expires_in": 60} if known else {"error": "no"}
            asked.append(form)
            data = json.dumps(answer).encode()
            self.send_response(200 if known else 401)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/token", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


EXPECTED = {f"k{key}": [str(number) for number in range(key, 50, 5)] for key in range(5)}


@pytest.mark.parametrize("delivery", ["at-least-once", "exactly-once"])
def test_every_client_has_a_token(broker: Broker, there: Scene, tmp_path: Path, delivery: str) -> None:
    user = tmp_path / "user"
    user.write_text("harvester")
    config = there.config_file(**settings(broker, user, delivery=delivery))
    run_cli("start", "-f", str(config), "--until-empty", env=ENV)
    assert published(broker, there) == EXPECTED


def test_client_credentials_of_a_provider_need_no_function(broker: Broker, there: Scene, tmp_path: Path) -> None:
    """As with Entra or Keycloak: the client library asks the provider itself, with id, secret and scope."""
    with provider() as (url, asked):
        kafka_config = settings(broker, tmp_path)["base_kafka_config"]
        del kafka_config["sasl.oauthbearer.config"]
        kafka_config |= {
            "sasl.oauthbearer.method": "oidc",
            "sasl.oauthbearer.token.endpoint.url": url,
            "sasl.oauthbearer.client.id": "harvester",
            "sasl.oauthbearer.client.secret": "secret",
            "sasl.oauthbearer.scope": "api://kafka/.default",
        }
        config = there.config_file(base_kafka_config=kafka_config)
        run_cli("start", "-f", str(config), "--until-empty", env=ENV)
    assert published(broker, there) == EXPECTED
    assert all(form["grant_type"] == ["client_credentials"] for form in asked)
    assert all(form["scope"] == ["api://kafka/.default"] for form in asked)
    assert len(asked) >= 2, "supervisor and shards each ask"


def test_a_function_that_fails_is_asked_again(broker: Broker, there: Scene, tmp_path: Path) -> None:
    user = tmp_path / "user"
    user.write_text("")
    config = there.config_file(**settings(broker, user))
    with RunningCli("start", "-f", str(config), env=ENV) as running:
        running.wait_for_line("oauth.token: tests.support.tokens:unsecured failed: RuntimeError: nobody knows")
        assert len(there.left()) == 50
        user.write_text("harvester")
        there.wait_left(timeout_s=120)
        assert running.stop() == 0
    assert "Traceback" not in running.output
    assert published(broker, there) == EXPECTED


def test_a_function_that_does_not_exist_is_refused(broker: Broker, scene: Scene, tmp_path: Path) -> None:
    given = settings(broker, tmp_path / "user") | {"oauth": {"token": "tests.support.tokens:missing"}}
    for command in ("start", "doctor", "config check"):
        done = run_cli(*command.split(), "-f", str(scene.config_file(**given)), env=ENV, check=False)
        assert done.returncode == 78, (command, done.stderr)
        assert "oauth.token: 'tests.support.tokens:missing' cannot be used" in done.stderr
        assert "Traceback" not in done.stderr
