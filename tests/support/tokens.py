"""A token function for tests: unsecured JSON Web Tokens, which Kafka's default validator takes."""

from __future__ import annotations

import base64
import json
import time
from pathlib import Path

LIFE_S = 60.0


def unsecured(config: str) -> tuple[str, float]:
    """Of the user that the file `config` names; RuntimeError while that is empty."""
    user = Path(config).read_text()
    if not user:
        raise RuntimeError("nobody knows who we are yet")
    return unsecured_of(user)


def unsecured_of(user: str) -> tuple[str, float]:
    """The token of a user, and when it expires."""
    now = time.time()
    claims = {"sub": user, "iat": now, "exp": now + LIFE_S}
    return f"{_part({'alg': 'none'})}.{_part(claims)}.", now + LIFE_S


def expired(_config: str) -> tuple[str, float]:
    """A token that is of no use any more."""
    return "old", 1.0


NOT_CALLABLE = "a text"


def _part(value: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")
