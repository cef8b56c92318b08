"""What must never be printed, and how it looks instead.

The names follow librdkafka's own list of sensitive properties, widened to anything that is named like one, so
that a misspelt `sasl.pasword` is the only thing that gets past, and that is refused before it is shown.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

MASK = "***"

_ANYWHERE = re.compile(r"pass|secret|credential", re.IGNORECASE)
_AT_END = re.compile(r"(\.pem|_pem|[._]key|^key|token|user\.info|sasl\.username|oauthbearer\.config)$", re.IGNORECASE)
_PATHS = re.compile(r"(\.location|\.file|passfile|\.id)$", re.IGNORECASE)
_URL_LOGIN = re.compile(r"(?<=://)[^/\s@]*@")


def is_secret(option: str) -> bool:
    """Whether the value of a Kafka option is a secret. Paths to key files are not."""
    if _PATHS.search(option):
        return False
    return bool(_ANYWHERE.search(option) or _AT_END.search(option))


def mask_option(option: str, value: str) -> str:
    """The value as it may be shown; a login inside a URL is masked too."""
    if is_secret(option):
        return MASK if value else value
    return _URL_LOGIN.sub(f"{MASK}@", value)


def mask_options(options: Mapping[str, str]) -> dict[str, str]:
    """Kafka options as they may be shown, in their order."""
    return {option: mask_option(option, value) for option, value in options.items()}


def scrub(text: str, options: Mapping[str, str]) -> str:
    """Somebody else's message (librdkafka's) with every secret value taken out."""
    for option, value in options.items():
        if is_secret(option) and value:
            text = text.replace(value, MASK)
    return text
