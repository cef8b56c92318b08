"""Makes records of values: one serialiser, and the headers that all its records carry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Generic, TypeVar
from uuid import uuid4

from harvester.errors import RecordRejected
from harvester.record import Headers, OutboxRecord
from harvester.serializers.cloudevents import CONTENT_TYPE, PREFIX, Value, cloud_event_headers
from harvester.serializers.protocol import Serialized, Serializer

T = TypeVar("T")


def _now() -> datetime:
    return datetime.now(UTC)


def _new_id() -> str:
    return str(uuid4())


@dataclass(frozen=True, slots=True)
class CloudEvents:
    """Every record is a CloudEvent 1.0 in binary content mode.

    `source` and `id` together have to be unique: repeats of one event have the same. `type` is for records that name
    none. `now` and `new_id` are asked for each record that is given no time or no id of its own.
    """

    source: str
    type: str | None = None
    dataschema: str | None = None
    now: Callable[[], datetime] = _now
    new_id: Callable[[], str] = _new_id


class Records(Generic[T]):
    """A maker of records; threads may share it."""

    def __init__(self, serializer: Serializer[T], *, cloud_events: CloudEvents | None = None) -> None:
        self._serializer = serializer
        self._events = cloud_events

    def make(
        self,
        topic: str,
        key: str | None,
        value: T | None,
        *,
        headers: Headers = (),
        partition: int | None = None,
        type: str | None = None,  # noqa: A002 - the attribute's name
        id: str | None = None,  # noqa: A002
        time: datetime | None = None,
        subject: str | None = None,
        extensions: Mapping[str, Value] | None = None,
    ) -> OutboxRecord:
        """A record for `stash`; raises RecordRejected, SerializationFailed among them. `value=None` is a tombstone.

        What stands behind `partition` is for CloudEvents. Headers come in this order: the caller's, the serialiser's,
        those of the event.
        """
        written = self._serializer.serialize(topic, value) if value is not None else None
        added = written.headers if written is not None else ()
        event = (type, id, time, subject, extensions)
        if self._events is not None:
            _refuse_theirs((*headers, *added))
            added += self._attributes(self._events, written, *event)
        elif any(attribute is not None for attribute in event):
            raise RecordRejected(
                "attributes of a CloudEvent were given for a record that is to be none",
                hint="Records(…, cloud_events=CloudEvents(source))",
            )
        return OutboxRecord(topic, key, written.value if written is not None else None, (*headers, *added), partition)

    def _attributes(
        self,
        events: CloudEvents,
        written: Serialized | None,
        type: str | None,  # noqa: A002
        id: str | None,  # noqa: A002
        time: datetime | None,
        subject: str | None,
        extensions: Mapping[str, Value] | None,
    ) -> tuple[tuple[str, str], ...]:
        kind = type if type is not None else events.type
        if kind is None:
            raise RecordRejected("a CloudEvent has a type, and none was given", hint="make(…, type=…)")
        return cloud_event_headers(
            id=id if id is not None else events.new_id(),
            source=events.source,
            type=kind,
            time=time if time is not None else events.now(),
            subject=subject,
            datacontenttype=self._serializer.content_type if written is not None else None,
            dataschema=events.dataschema,
            extensions=extensions,
        )


def _refuse_theirs(headers: Headers) -> None:
    for name, _ in headers:
        if name.lower() == CONTENT_TYPE or name.startswith(PREFIX):
            raise RecordRejected(f"header {name!r} belongs to the CloudEvent", hint="give it as an attribute instead")
