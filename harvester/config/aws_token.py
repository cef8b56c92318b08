"""`oauth.token = "aws"`: tokens for MSK with IAM, signed by botocore; no request is sent to get one.

A token is a presigned URL of `kafka-cluster:Connect` (Signature Version 4, query string), in base64 without padding.
Credentials come from wherever botocore finds them: variables, a profile, or the role of a pod, container or machine.
botocore renews credentials that expire.
"""

from __future__ import annotations

import base64
import calendar
import os
import time
from functools import lru_cache
from typing import Any
from urllib.parse import parse_qs, urlsplit

LIFE_S = 900
_SERVICE = "kafka-cluster"
_OPTIONS = ("region", "profile")


def token(config: str) -> tuple[str, float]:
    """The token, and when it expires; `config` may be `region=eu-west-1 profile=relay`."""
    options = _options(config)
    session = _session(options.get("profile"))
    region = options.get("region") or os.environ.get("AWS_REGION") or session.get_config_variable("region")
    if not region:
        raise ValueError('no region: set AWS_REGION, or "sasl.oauthbearer.config" = "region=…" in base_kafka_config')
    credentials = session.get_credentials()
    if credentials is None:
        raise ValueError("no AWS credentials: botocore finds none in the environment, a profile, or a role")
    return signed(credentials, region)


def signed(credentials: Any, region: str) -> tuple[str, float]:
    """The token of these botocore credentials, valid from now."""
    from botocore.auth import SigV4QueryAuth
    from botocore.awsrequest import AWSRequest

    url = f"https://kafka.{region}.amazonaws.com/?Action=kafka-cluster%3AConnect"
    request = AWSRequest("GET", url)
    SigV4QueryAuth(credentials.get_frozen_credentials(), _SERVICE, region, expires=LIFE_S).add_auth(request)
    (began,) = parse_qs(urlsplit(request.url).query)["X-Amz-Date"]
    expires = calendar.timegm(time.strptime(began, "%Y%m%dT%H%M%SZ")) + LIFE_S
    # Not signed: brokers do not verify it.
    text = f"{request.url}&User-Agent=outbox-harvester"
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("="), float(expires)


def _options(config: str) -> dict[str, str]:
    found = dict(word.partition("=")[::2] for word in config.replace(",", " ").split())
    for name in found:
        if name not in _OPTIONS:
            raise ValueError(f"sasl.oauthbearer.config: {name!r} is not one of {', '.join(_OPTIONS)}")
    return found


@lru_cache(maxsize=1)
def _session(profile: str | None) -> Any:
    """One per process: it caches credentials and renews them."""
    from botocore.session import Session

    return Session(profile=profile)
