"""Gets SASL OAUTHBEARER tokens from a function of the application, or from AWS.

Every client of every process needs tokens, so the shards are sent the function's name: a string, like all options, that
is callable. librdkafka's own `sasl.oauthbearer.method=oidc` needs none of this.

`oauth.token = "aws"` stands for `aws_token`: tokens for MSK with IAM, signed by botocore; no request is sent to get
one. A token is a presigned URL of `kafka-cluster:Connect` (Signature Version 4, query string), in base64 without
padding. Credentials come from wherever botocore finds them: variables, a profile, or the role of a pod, container or
machine. botocore renews credentials that expire.
"""

from __future__ import annotations

import base64
import calendar
import importlib
import logging
import os
import re
import time
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any
from urllib.parse import parse_qs, urlsplit

from harvester.config.kafka_options import get
from harvester.config.problems import echo, refuse
from harvester.errors import ConfigurationError, Problem

FORM = '"module:function", "aws" for MSK with IAM, or "" for none'
_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)
_PATH = "oauth.token"
_OURS = {"aws": "harvester.config.oauth:aws_token"}
# Without a token a new client fails permanently. With one that every broker refuses, it reports the refusal and asks
# again after four fifths of this time.
_NO_TOKEN, _AGAIN_S = "no-token", 5.0
AWS_LIFE_S = 900
_AWS_SERVICE = "kafka-cluster"
_AWS_OPTIONS = ("region", "profile")
_last: dict[str, tuple[Any, ...]] = {}  # each function's last answer in this process, shared by its clients


class TokenHook(str):
    """The function's name; calling it calls the function. librdkafka calls it from its own threads."""

    __slots__ = ()

    @classmethod
    def of(cls, name: str) -> TokenHook:
        """Raises ConfigurationError if there is no such function to import."""
        hook = cls(name)
        try:
            hook._function()
            if name == "aws":
                importlib.import_module("botocore.session")
        except Exception as error:  # noqa: BLE001 - a module may raise anything while it is imported
            problem = Problem(_PATH, f"{name!r} cannot be used: {type(error).__name__}: {error}", FORM)
            hint = "install the module where the harvester runs, or put its directory on PYTHONPATH"
            if name in _OURS:
                hint = f"pip install 'outbox-harvester[{name}]'"
            raise ConfigurationError([problem], hint=hint) from None
        return hook

    def __call__(self, config: str | None) -> tuple[Any, ...]:
        """(token, when it expires in seconds since 1970[, principal[, extensions]]) as returned by the function.

        `config` is the option `sasl.oauthbearer.config`. If the function fails, the last token is used while it is
        valid; after that brokers refuse the clients until there is a new one.
        """
        try:
            answer = tuple(self._function()(config or ""))
            _check(answer)
        except Exception as error:  # noqa: BLE001 - whatever it raises, open connections should stay
            text = f"oauth.token: {self} failed: {type(error).__name__}: {error}"
            logger = logging.getLogger("harvester")
            if logger.hasHandlers():  # shards have none: the elector reports it
                logger.warning("%s", text)
            return _last[self] if _is_valid(_last.get(self)) else (_NO_TOKEN, time.time() + _AGAIN_S)
        _last[self] = answer
        return answer

    def _function(self) -> Callable[[str], Any]:
        module, _, name = _OURS.get(self, self).partition(":")
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
        if not callable(found):
            raise TypeError("it is not a function")
        return found  # type: ignore[no-any-return]


def _check(answer: tuple[Any, ...]) -> None:
    if not 2 <= len(answer) <= 4 or not isinstance(answer[0], str) or not isinstance(answer[1], int | float):
        raise TypeError("it must return (token, expiry in seconds since 1970[, principal[, extensions]])")
    if not _is_valid(answer):
        raise ValueError("its token has already expired")


def _is_valid(answer: tuple[Any, ...] | None) -> bool:
    return answer is not None and bool(answer[1] > time.time())


def read_hook_name(value: object) -> str:
    """The dotted name of a function, or empty."""
    text = value.strip() if isinstance(value, str) else None
    if text is None or (text and text not in _OURS and not _NAME.fullmatch(text)):
        refuse(f"{echo(value)} does not name a function", FORM)
    return text


def hook_problems(name: str, base: Mapping[str, str]) -> list[Problem]:
    """Problems with using this function with these options."""
    mechanism, protocol = (get(base, option) or "" for option in ("sasl.mechanisms", "security.protocol"))
    if not name or (mechanism.upper() == "OAUTHBEARER" and protocol.upper().startswith("SASL_")):
        return []
    allowed = 'base_kafka_config with "sasl.mechanism" = "OAUTHBEARER" and "security.protocol" = "SASL_SSL"'
    return [Problem(_PATH, "requires SASL OAUTHBEARER", allowed)]


def aws_token(config: str) -> tuple[str, float]:
    """The token, and when it expires; `config` may be `region=eu-west-1 profile=relay`."""
    options = _aws_options(config)
    session = _aws_session(options.get("profile"))
    region = options.get("region") or os.environ.get("AWS_REGION") or session.get_config_variable("region")
    if not region:
        raise ValueError('no region: set AWS_REGION, or "sasl.oauthbearer.config" = "region=…" in base_kafka_config')
    credentials = session.get_credentials()
    if credentials is None:
        raise ValueError("no AWS credentials: botocore finds none in the environment, a profile, or a role")
    return sign_aws_token(credentials, region)


def sign_aws_token(credentials: Any, region: str) -> tuple[str, float]:
    """The token of these botocore credentials, valid from now."""
    from botocore.auth import SigV4QueryAuth
    from botocore.awsrequest import AWSRequest

    url = f"https://kafka.{region}.amazonaws.com/?Action=kafka-cluster%3AConnect"
    request = AWSRequest("GET", url)
    SigV4QueryAuth(credentials.get_frozen_credentials(), _AWS_SERVICE, region, expires=AWS_LIFE_S).add_auth(request)
    (began,) = parse_qs(urlsplit(request.url).query)["X-Amz-Date"]
    expires = calendar.timegm(time.strptime(began, "%Y%m%dT%H%M%SZ")) + AWS_LIFE_S
    # Not signed: brokers do not verify it.
    text = f"{request.url}&User-Agent=outbox-harvester"
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("="), float(expires)


def _aws_options(config: str) -> dict[str, str]:
    found = dict(word.partition("=")[::2] for word in config.replace(",", " ").split())
    for name in found:
        if name not in _AWS_OPTIONS:
            raise ValueError(f"sasl.oauthbearer.config: {name!r} is not one of {', '.join(_AWS_OPTIONS)}")
    return found


@lru_cache(maxsize=1)
def _aws_session(profile: str | None) -> Any:
    """One per process: it caches credentials and renews them."""
    from botocore.session import Session

    return Session(profile=profile)
