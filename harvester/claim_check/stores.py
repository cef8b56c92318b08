"""Stores for values: a directory, mostly of a shared file system, and S3 or what speaks its protocol (extra `[s3]`).

`put` returns once the object is durable under its name, and gives the same name the same object however often it is
repeated, from however many processes. Nothing is ever deleted here: a store's own rules do that by an object's age,
which counts from its last `put`.
"""

from __future__ import annotations

import os
import secrets
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from harvester.claim_check.settings import StoreSettings
from harvester.errors import ConfigurationError, Problem, StoredValueMissing, StoreUnavailable

_CONNECT_S, _ANSWER_S = 5, 30
_MISSING = frozenset({"NoSuchKey", "404", "NotFound"})


class Store(Protocol):
    """Holds values by name. Safe for several threads."""

    @property
    def url(self) -> str: ...  # to which a slash and the object's name are added

    def put(self, name: str, value: bytes) -> None:
        """Store it, durably; raises StoreUnavailable, after which it may be there or not."""

    def get(self, name: str) -> bytes:
        """All of an object; raises StoredValueMissing, StoreUnavailable."""


def open_store(settings: StoreSettings) -> Store:
    """Nothing is asked yet; raises ConfigurationError where the library for S3 is missing."""
    return DirectoryStore(settings) if settings.url.startswith("file:") else S3Store(settings)


class DirectoryStore:
    """A file for each value, in a directory for each topic. The directory itself has to exist: a shared file system
    that is not mounted must not be mistaken for an empty one.
    """

    def __init__(self, settings: StoreSettings) -> None:
        self.url = settings.url
        self._root = Path(unquote(urlsplit(settings.url).path))

    def put(self, name: str, value: bytes) -> None:
        """Written apart, and renamed once it is on the disk: whoever reads finds all of it, or nothing."""
        path = self._root / name
        partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            if not path.parent.is_dir():
                path.parent.mkdir(exist_ok=True)
                _sync_directory(self._root)
            try:
                with partial.open("xb") as file:
                    file.write(value)
                    file.flush()
                    os.fsync(file.fileno())
                partial.replace(path)
            except BaseException:
                partial.unlink(missing_ok=True)
                raise
            _sync_directory(path.parent)
        except OSError as error:
            raise StoreUnavailable(self.url, str(error)) from error

    def get(self, name: str) -> bytes:
        try:
            return (self._root / name).read_bytes()
        except FileNotFoundError as error:
            if not self._root.is_dir():
                raise StoreUnavailable(self.url, str(error)) from error
            raise StoredValueMissing(f"{self.url}/{name}") from error
        except OSError as error:
            raise StoreUnavailable(self.url, str(error)) from error


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class S3Store:
    """An object for each value. boto3 is imported at the first use, so that shards without large values go without."""

    def __init__(self, settings: StoreSettings) -> None:
        from importlib.util import find_spec

        if find_spec("boto3") is None:
            raise ConfigurationError(
                [Problem("url", f"{settings.url} is S3, for which boto3 is missing")],
                hint="pip install 'outbox-harvester[s3]'",
            )
        self.url, self._settings = settings.url, settings
        parts = urlsplit(settings.url)
        self._bucket, self._prefix = parts.netloc, f"{parts.path.lstrip('/')}/".lstrip("/")

    def __reduce__(self) -> tuple[type[S3Store], tuple[StoreSettings]]:
        return S3Store, (self._settings,)  # a client cannot go to another process

    def put(self, name: str, value: bytes) -> None:
        self._call("put_object", Key=self._prefix + name, Body=value)

    def get(self, name: str) -> bytes:
        answer = self._call("get_object", Key=self._prefix + name)
        try:
            body: bytes = answer["Body"].read()
        except Exception as error:  # urllib3's and botocore's, of no common kind
            raise StoreUnavailable(self.url, str(error)) from error
        return body

    def _call(self, operation: str, **given: Any) -> Any:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            return getattr(self._client, operation)(Bucket=self._bucket, **given)
        except ClientError as error:
            if operation == "get_object" and error.response.get("Error", {}).get("Code") in _MISSING:
                raise StoredValueMissing(f"s3://{self._bucket}/{given['Key']}") from error
            raise StoreUnavailable(self.url, str(error)) from error
        except BotoCoreError as error:
            raise StoreUnavailable(self.url, str(error)) from error

    @cached_property
    def _client(self) -> Any:
        import boto3
        from botocore.config import Config

        settings = self._settings
        options = Config(
            connect_timeout=_CONNECT_S,
            read_timeout=_ANSWER_S,
            retries={"mode": "standard", "max_attempts": 2},
            # Elsewhere than at Amazon a bucket is seldom a host name.
            s3={"addressing_style": "path"} if settings.endpoint else None,
        )
        # A session of its own, which is not safe for several threads; clients are.
        return boto3.session.Session().client(
            "s3", endpoint_url=settings.endpoint or None, region_name=settings.region or None, config=options
        )
