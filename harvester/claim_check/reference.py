"""The settings of a store for values, and the reference that a record carries in place of its value. Pure.

A value is stored as `<topic>/<id of the row>-<SHA-256>`. So the same row always yields the same object, no two rows
share one, and a store can keep each topic's objects for a separate time. Three headers describe it, in UTF-8:

    harvester.claim-check          its location, e.g. s3://bucket/prefix/orders/4711-9f86d081…
    harvester.claim-check.bytes    its length
    harvester.claim-check.sha256   its SHA-256, in hexadecimal digits

The body repeats the location in plain text: a consumer that expects JSON or Avro and does not support claim checks
fails on it, instead of taking it for a value without fields. It also tells a reference from a record to which an
application copied the headers of another. A consumer takes the object's name from the header, but the store from its
own settings: no record can redirect it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from hashlib import sha256
from typing import Any
from urllib.parse import urlsplit

from harvester.errors import ConfigurationError, Problem, StoredValueChanged
from harvester.origin import find
from harvester.record import KafkaRecord

HEADER = "harvester.claim-check"
BYTES_HEADER = f"{HEADER}.bytes"
DIGEST_HEADER = f"{HEADER}.sha256"
_NAME = re.compile(r"(?:^|/)((?!\.{1,2}/)[a-zA-Z0-9._-]{1,249}/-?[0-9]{1,19}-([0-9a-f]{64}))\Z", re.ASCII)
_LENGTH = re.compile(rb"[0-9]{1,18}\Z")
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


@dataclass(frozen=True, slots=True)
class Reference:
    """An object in a store: its name, and the length and SHA-256 of the value."""

    name: str
    length: int
    digest: str

    def check(self, value: bytes) -> bytes:
        """The value, if it is the stored one; raises StoredValueChanged."""
        if len(value) != self.length:
            raise StoredValueChanged(self.name, f"it has {len(value):,} bytes instead of {self.length:,}")
        if sha256(value).hexdigest() != self.digest:
            raise StoredValueChanged(self.name, "its SHA-256 differs")
        return value


def refer(record: KafkaRecord) -> Reference:
    """The object that holds this record's value: always the same for the same row."""
    value = record.value or b""
    digest = sha256(value).hexdigest()
    return Reference(f"{record.topic}/{record.id}-{digest}", len(value), digest)


def replaced(record: KafkaRecord, reference: Reference, store_url: str) -> KafkaRecord:
    """The record as it is published: with a reference in place of its value."""
    url = f"{store_url}/{reference.name}".encode()
    headers = [
        *record.headers,
        (HEADER, url),
        (BYTES_HEADER, b"%d" % reference.length),
        (DIGEST_HEADER, reference.digest.encode()),
    ]
    return record._replace(value=url, headers=headers)


def location(value: bytes | str | None, headers: Any) -> bytes | None:
    """Where a record's value is stored; None if its headers do not name its body, so that the value is its own."""
    url = find(headers, HEADER)
    body = value.encode("utf-8", "replace") if isinstance(value, str) else value
    return url if url == body else None


def read(value: bytes | str | None, headers: Any) -> Reference | None:
    """The reference in a record, where the last header of a name counts; None if the value is the record's own.

    Raises StoredValueChanged for headers that do not name an object.
    """
    url = location(value, headers)
    if url is None:
        return None
    found = _NAME.search(url.decode("utf-8", "replace"))
    length, digest = find(headers, BYTES_HEADER) or b"", find(headers, DIGEST_HEADER) or b""
    if found is None or found[2].encode() != digest or not _LENGTH.match(length):
        raise StoredValueChanged(repr(url[:300]), "the headers of the record do not name an object")
    return Reference(found[1], int(length), found[2])
