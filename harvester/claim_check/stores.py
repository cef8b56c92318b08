"""Stores for values: a directory, usually in a shared file system, and S3 or compatible services (extra `[s3]`).

`put` returns once the object is durable under its name, and repeating it, from any number of processes, yields the same
object. Nothing is ever deleted here: a store's lifecycle rules do that by an object's age, which counts from its last
`put`.
"""

from __future__ import annotations

import os
import secrets
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from harvester.claim_check.reference import StoreSettings
from harvester.errors import ConfigurationError, Problem, StoredValueMissing, StoreUnavailable

_CONNECT_S, _ANSWER_S = 5, 30
_MISSING = frozenset({"NoSuchKey", "404", "NotFound"})
_READING = (
    "grant s3:GetObject below the prefix and s3:ListBucket on the bucket: without the latter, S3 does not tell whether"
    " the object is missing"
)


class Store(Protocol):
    """Holds values by name. Thread-safe."""

    @property
    def url(self) -> str: ...  # a slash and the object's name are appended to it

    def put(self, name: str, value: bytes) -> None:
        """Store a value durably; raises StoreUnavailable, after which it may or may not be stored."""

    def get(self, name: str) -> bytes:
        """The whole object; raises StoredValueMissing, StoreUnavailable."""


def open_store(settings: StoreSettings) -> Store:
    """Does not contact the store yet; raises ConfigurationError if the library for S3 is missing."""
    return DirectoryStore(settings) if settings.url.startswith("file:") else S3Store(settings)


class DirectoryStore:
    """A file per value, in a directory per topic. The directory itself must exist: a shared file system that is not
    mounted must not be mistaken for an empty one.
    """

    def __init__(self, settings: StoreSettings) -> None:
        self.url = settings.url
        self._root = Path(unquote(urlsplit(settings.url).path))

    def put(self, name: str, value: bytes) -> None:
        """Written to a temporary file and renamed once it is on disk: readers find all of it, or nothing."""
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
    """An object per value. boto3 is imported on first use, so that shards without large values do not load it."""

    def __init__(self, settings: StoreSettings) -> None:
        from importlib.util import find_spec

        if find_spec("boto3") is None:
            raise ConfigurationError(
                [Problem("url", f"{settings.url} is on S3, but boto3 is not installed")],
                hint="pip install 'outbox-harvester[s3]'",
            )
        self.url, self._settings = settings.url, settings
        parts = urlsplit(settings.url)
        self._bucket, self._prefix = parts.netloc, f"{parts.path.lstrip('/')}/".lstrip("/")

    def __reduce__(self) -> tuple[type[S3Store], tuple[StoreSettings]]:
        return S3Store, (self._settings,)  # a client cannot be sent to another process

    def put(self, name: str, value: bytes) -> None:
        self._call("put_object", Key=self._prefix + name, Body=value)

    def get(self, name: str) -> bytes:
        answer = self._call("get_object", Key=self._prefix + name)
        try:
            body: bytes = answer["Body"].read()
        except Exception as error:  # urllib3's and botocore's have no common base
            raise StoreUnavailable(self.url, str(error)) from error
        return body

    def _call(self, operation: str, **given: Any) -> Any:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            return getattr(self._client, operation)(Bucket=self._bucket, **given)
        except ClientError as error:
            code, place = error.response.get("Error", {}).get("Code"), f"s3://{self._bucket}/{given['Key']}"
            if operation == "get_object" and code in _MISSING:
                raise StoredValueMissing(place) from error
            if operation == "get_object" and code == "AccessDenied":
                raise StoreUnavailable(self.url, f"{error} ({place} may also be missing)", _READING) from error
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
            # Outside Amazon, buckets are rarely host names.
            s3={"addressing_style": "path"} if settings.endpoint else None,
        )
        # A separate session: sessions are not thread-safe, but clients are.
        return boto3.session.Session().client(
            "s3", endpoint_url=settings.endpoint or None, region_name=settings.region or None, config=options
        )
