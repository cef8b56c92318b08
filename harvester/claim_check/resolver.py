"""Gets the values of records from a store, and checks that they are what the relay stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from harvester.claim_check import reference
from harvester.claim_check.reference import StoreSettings
from harvester.claim_check.stores import open_store
from harvester.errors import ClaimCheckError, StoredValueChanged, StoredValueMissing

_HEADERS = (reference.HEADER, reference.BYTES_HEADER, reference.DIGEST_HEADER)


class ClaimChecks:
    """Resolves records from one store; `ClaimChecks("s3://bucket/prefix")`. Thread-safe.

    Raises ConfigurationError if the store is invalid. Missing or changed values, and an unreachable store, raise
    ClaimCheckErrors.
    """

    def __init__(self, store: StoreSettings | Mapping[str, str] | str) -> None:
        """A mapping has the fields of StoreSettings."""
        if isinstance(store, str):
            store = StoreSettings(store)
        elif isinstance(store, Mapping):
            store = StoreSettings(**store)
        self._store = open_store(store)

    def value(self, value: bytes | None, headers: Any) -> bytes | None:
        """The value of a record with this value and these headers (or None): from the store, or its own.

        It is in the store only if the record's own value is the URL that its headers name.
        """
        found = reference.read(value, headers)
        if found is None:
            return value
        stored = self._store.get(found.name)
        try:
            return found.check(stored)
        except StoredValueChanged as error:
            raise StoredValueChanged(f"{self._store.url}/{found.name}", error.reason) from None

    def applies_to(self, record: Any) -> bool:
        """Whether a record's value is in a store."""
        return reference.location(record.value(), record.headers()) is not None

    def resolving(self, handler: Callable[[Any], object]) -> Callable[[Any], object]:
        """The handler, given records, or lists of them, as returned by `resolve`."""

        def handle(given: Any) -> object:
            many = isinstance(given, list)
            return handler([self.resolve(record) for record in given] if many else self.resolve(given))

        return handle

    def resolve(self, record: Any) -> Any:
        """The record itself, or one with its value from the store; anything with `value()` and `headers()`."""
        if not self.applies_to(record):
            return record
        return ResolvedRecord(record, self.value(record.value(), record.headers()))

    def resolve_or_mark(self, record: Any) -> Any:
        """Like `resolve`; if waiting would not bring the value, returns a record whose `value()` raises the error."""
        try:
            return self.resolve(record)
        except (StoredValueChanged, StoredValueMissing) as error:
            return UnresolvedRecord(record, error)


class ResolvedRecord:
    """A record with its value from the store, and without the headers that refer to it; otherwise like the consumed
    one.
    """

    __slots__ = ("_record", "_value")

    def __init__(self, record: Any, value: bytes | None) -> None:
        self._record, self._value = record, value

    def __getattr__(self, name: str) -> Any:
        return getattr(self._record, name)

    def value(self) -> bytes | None:
        return self._value

    def headers(self) -> list[tuple[str, bytes]]:
        return [(name, value) for name, value in self._record.headers() if name not in _HEADERS]


class UnresolvedRecord:
    """A record whose value is not available: `value()` raises the error; otherwise like the consumed one."""

    __slots__ = ("_error", "_record")

    def __init__(self, record: Any, error: ClaimCheckError) -> None:
        self._record, self._error = record, error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._record, name)

    def value(self) -> bytes | None:
        raise self._error
