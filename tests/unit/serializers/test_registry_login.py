"""A registry that asks who is there: basic, bearer, and OpenID Connect, by the client's own options."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs

import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient

from harvester.errors import SerializationFailed
from harvester.serializers.registry import avro, read_avro
from tests.support.registry import answering

ORDER = json.dumps({"type": "record", "name": "Order", "fields": [{"name": "total", "type": "int"}]})


class Registry:
    """Knows one schema and answers to one `Authorization` only; `/token` gives a token for the right secret."""

    def __init__(self, allowed: str) -> None:
        self.allowed, self.url = allowed, ""
        self.asked: list[dict[str, list[str]]] = []

    def token(self, form: dict[str, list[str]], authorization: str | None) -> dict[str, Any] | None:
        self.asked.append(form)
        expected = "Basic " + base64.b64encode(b"harvester:secret").decode()
        in_form = (form.get("client_id"), form.get("client_secret")) == (["harvester"], ["secret"])
        if form.get("grant_type") != ["client_credentials"] or not (in_form or authorization == expected):
            return None
        return {"access_token": "of-the-provider", "token_type": "Bearer", "expires_in": 300}


@contextmanager
def serving(registry: Registry) -> Iterator[Registry]:
    def answer(request: BaseHTTPRequestHandler, body: bytes) -> tuple[int, Any]:
        authorization = request.headers.get("Authorization")
        if request.path == "/token":
            token = registry.token(parse_qs(body.decode()), authorization)
            return (200, token) if token else (401, {"error": "invalid_client"})
        if authorization != registry.allowed:
            return 401, {"error_code": 401, "message": "Unauthorized"}
        if request.path.startswith("/associations/"):  # newer clients look for a subject by the topic first
            return 404, {"error_code": 404, "message": "no associations"}
        return 200, {"id": 7, "version": 1, "subject": "orders-value", "schema": ORDER, "schemaType": "AVRO"}

    with answering(answer) as registry.url:
        yield registry


LOGINS: dict[str, tuple[str, dict[str, str]]] = {
    "basic": (
        "Basic " + base64.b64encode(b"harvester:secret").decode(),
        {"basic.auth.user.info": "harvester:secret"},
    ),
    "bearer": (
        "Bearer of-ours",
        {
            "bearer.auth.credentials.source": "STATIC_TOKEN",
            "bearer.auth.token": "of-ours",
            "bearer.auth.logical.cluster": "lsrc-1",
            "bearer.auth.identity.pool.id": "pool-1",
        },
    ),
    "oidc": (
        "Bearer of-the-provider",
        {
            "bearer.auth.credentials.source": "OAUTHBEARER",
            "bearer.auth.issuer.endpoint.url": "{url}/token",
            "bearer.auth.client.id": "harvester",
            "bearer.auth.client.secret": "secret",
            "bearer.auth.scope": "registry",
            "bearer.auth.logical.cluster": "lsrc-1",
            "bearer.auth.identity.pool.id": "pool-1",
        },
    ),
}


@pytest.mark.parametrize("login", LOGINS)
def test_the_client_logs_in(login: str) -> None:
    allowed, options = LOGINS[login]
    with serving(Registry(allowed)) as registry:
        filled = {name: value.format(url=registry.url) for name, value in options.items()}
        client = SchemaRegistryClient({"url": registry.url, **filled})
        data = avro(client, ORDER).serialize("orders", {"total": 99}).value
        assert isinstance(data, bytes)
        assert data[:5] == b"\0\0\0\0\7"
        assert read_avro(client).deserialize("orders", data) == {"total": 99}
        assert len(registry.asked) == (login == "oidc"), "a token is asked for once"


def test_a_registry_that_refuses_is_an_error_with_a_hint() -> None:
    with serving(Registry("Basic of-somebody-else")) as registry:
        client = SchemaRegistryClient({"url": registry.url, "basic.auth.user.info": "harvester:wrong"})
        with pytest.raises(SerializationFailed, match="Unauthorized") as caught:
            avro(client, ORDER).serialize("orders", {"total": 99})
        assert "wrong" not in str(caught.value)
