"""The settings of a store for values, and the normal form of its URL. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from harvester.errors import ConfigurationError, Problem

FORM = '"file:///directory" or "s3://bucket/prefix"'
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """A store's `url`; for S3 also `endpoint` and `region`, if they differ from the environment's.

    Credentials for S3 come from wherever boto3 finds them: environment, shared files, or the machine's role.
    """

    url: str
    endpoint: str = ""
    region: str = ""

    def __post_init__(self) -> None:
        """Raises ConfigurationError."""
        try:
            url = read_url(self.url)
        except ValueError as error:
            raise ConfigurationError([Problem("url", str(error), FORM)]) from None
        object.__setattr__(self, "url", url)


def read_url(text: str) -> str:
    """The normalised URL of a store, without a trailing slash; raises ValueError for anything else."""
    try:
        parts = urlsplit(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a URL") from None
    path = parts.path.rstrip("/")
    if parts.query or parts.fragment or not text.isprintable():
        raise ValueError(f"{text!r} is not the URL of a store")
    if parts.scheme == "file" and parts.netloc in ("", "localhost") and path:
        return f"file://{path}"
    if parts.scheme == "s3" and _BUCKET.fullmatch(parts.netloc):
        return f"s3://{parts.netloc}{path}"
    raise ValueError(f"{text!r} is not the URL of a store")
