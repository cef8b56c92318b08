"""Tokens for MSK: their signature, against a reference that the published vectors prove."""

from __future__ import annotations

import base64
import hashlib
import hmac
import time
from typing import Any
from urllib.parse import parse_qsl, quote, urlsplit

import pytest
from botocore.credentials import Credentials

from harvester.config import Config
from harvester.config.oauth import AWS_LIFE_S, TokenHook, aws_token, sign_aws_token
from harvester.errors import ConfigurationError

EMPTY = hashlib.sha256(b"").hexdigest()


def reference(
    secret: str, at: str, region: str, service: str, host: str, path: str, query: dict[str, str], payload: str = EMPTY,
    headers: dict[str, str] | None = None,
) -> str:  # fmt: skip
    """Signature Version 4 of a GET, from its definition."""
    named = {"host": host, **(headers or {})}
    canonical = "&".join(f"{quote(n, safe='-_.~')}={quote(v, safe='-_.~')}" for n, v in sorted(query.items()))
    lines = "".join(f"{name}:{value}\n" for name, value in sorted(named.items()))
    request = "\n".join(["GET", path, canonical, lines, ";".join(sorted(named)), payload])
    scope = f"{at[:8]}/{region}/{service}/aws4_request"
    text = "\n".join(["AWS4-HMAC-SHA256", at, scope, hashlib.sha256(request.encode()).hexdigest()])
    key = f"AWS4{secret}".encode()
    for part in scope.split("/"):
        key = hmac.new(key, part.encode(), "sha256").digest()
    return hmac.new(key, text.encode(), "sha256").hexdigest()


def test_the_reference_gives_the_published_signatures() -> None:
    # aws-sig-v4-test-suite, get-vanilla
    assert reference(
        "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY", "20150830T123600Z", "us-east-1", "service",
        "example.amazonaws.com", "/", {}, headers={"x-amz-date": "20150830T123600Z"},
    ) == "5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31"  # fmt: skip
    # Amazon S3 API reference, authenticating requests using query parameters: a presigned URL
    query = {
        "X-Amz-Algorithm": "AWS4-HMAC-SHA256",
        "X-Amz-Credential": "AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request",
        "X-Amz-Date": "20130524T000000Z",
        "X-Amz-Expires": "86400",
        "X-Amz-SignedHeaders": "host",
    }
    assert reference(
        "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", "20130524T000000Z", "us-east-1", "s3",
        "examplebucket.s3.amazonaws.com", "/test.txt", query, "UNSIGNED-PAYLOAD",
    ) == "aeeed9bbccd4d02ee5c0109b86d86835f995330da4c265957d157751f604d404"  # fmt: skip


@pytest.mark.parametrize("session_token", [None, "of/a+role=="])
def test_a_token_is_signed(session_token: str | None) -> None:
    credentials: Any = Credentials("AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY", session_token)
    text, expires = sign_aws_token(credentials, "eu-west-1")
    assert "=" not in text
    url = urlsplit(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)).decode())
    assert (url.scheme, url.netloc, url.path) == ("https", "kafka.eu-west-1.amazonaws.com", "/")
    query = dict(parse_qsl(url.query))
    assert query.pop("User-Agent")
    signature = query.pop("X-Amz-Signature")
    at = query["X-Amz-Date"]
    assert query == {
        "Action": "kafka-cluster:Connect",
        "X-Amz-Algorithm": "AWS4-HMAC-SHA256",
        "X-Amz-Credential": f"AKIDEXAMPLE/{at[:8]}/eu-west-1/kafka-cluster/aws4_request",
        "X-Amz-Date": at,
        "X-Amz-Expires": str(AWS_LIFE_S),
        "X-Amz-SignedHeaders": "host",
        **({"X-Amz-Security-Token": session_token} if session_token else {}),
    }
    assert signature == reference(credentials.secret_key, at, "eu-west-1", "kafka-cluster", url.netloc, "/", query)
    assert 0 < expires - time.time() <= AWS_LIFE_S


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setattr("harvester.config.oauth._last", {})
    from harvester.config import oauth

    oauth._aws_session.cache_clear()
    return monkeypatch


def host(text: str) -> str:
    return urlsplit(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)).decode()).netloc


def test_where_the_region_comes_from(environment: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="AWS_REGION"):
        aws_token("")
    environment.setenv("AWS_DEFAULT_REGION", "eu-north-1")
    assert host(aws_token("")[0]) == "kafka.eu-north-1.amazonaws.com"
    environment.setenv("AWS_REGION", "eu-west-1")
    assert host(aws_token("")[0]) == "kafka.eu-west-1.amazonaws.com"
    assert host(aws_token("region=us-east-1")[0]) == "kafka.us-east-1.amazonaws.com"
    with pytest.raises(ValueError, match="'zone' is not one of region, profile"):
        aws_token("zone=a")


def test_without_credentials_brokers_refuse(environment: pytest.MonkeyPatch) -> None:
    environment.delenv("AWS_ACCESS_KEY_ID")
    environment.setenv("AWS_REGION", "eu-west-1")
    assert TokenHook.of("aws")("")[0] == "no-token"


def test_the_setting_takes_aws(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("AWS_REGION", "eu-west-1")
    kafka = {"bootstrap.servers": "b:9098", "sasl.mechanism": "OAUTHBEARER", "security.protocol": "SASL_SSL"}
    config = Config(leader_group_id="g", base_kafka_config=kafka, oauth={"token": "aws"})
    hook = config.common_options()["oauth_cb"]
    assert isinstance(hook, TokenHook)
    assert hook("")[1] > time.time()


def test_without_botocore_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "botocore.session", None)
    with pytest.raises(ConfigurationError) as caught:
        TokenHook.of("aws")
    assert "outbox-harvester[aws]" in (caught.value.hint or "")
