"""Makes records from values: one serialiser, and the headers common to all records, including CloudEvents'.

A CloudEvent 1.0 is written in Kafka's binary content mode: each attribute except the data becomes a header `ce_<name>`
with the attribute's canonical text in UTF-8; datacontenttype is `content-type`. Values are not percent-encoded, as in
the HTTP binding: a reader would take "%20" literally. Only URI attributes are, as far as a URI requires it.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Generic, NoReturn, TypeVar
from urllib.parse import quote
from uuid import uuid4

from harvester.errors import RecordRejected
from harvester.record import Headers, OutboxRecord
from harvester.serializers.plain import Serializer

Value = str | int | bool | bytes | datetime

SPEC_VERSION = "1.0"
CONTENT_TYPE = "content-type"
PREFIX = "ce_"

_NAME = re.compile(r"[a-z0-9]+")
_CORE = frozenset({"data", "datacontenttype", "dataschema", "id", "source", "specversion", "subject", "time", "type"})
# Control characters, lone surrogates and noncharacters (CloudEvents 1.0, type system: String).
_FORBIDDEN = re.compile(
    "[\x00-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef"
    + "".join(chr(plane << 16 | low) for plane in range(17) for low in (0xFFFE, 0xFFFF))
    + "]"
)
_MEDIA_TYPE = re.compile(r"[!#$%&'*+.^_`|~\w-]+/[!#$%&'*+.^_`|~\w-]+(?:\s*;.*)?", re.ASCII)
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
_AUTHORITY = re.compile(r"(?:[A-Za-z][A-Za-z0-9+.-]*:)?//[^/?#]*")
_STRAY_PERCENT = re.compile(r"%(?![0-9A-Fa-f]{2})")
_URI_CHARACTERS = "%!$&'()*+,/:;=?@~"


def cloud_event_headers(
    *,
    id: str,  # noqa: A002 - the attributes' names
    source: str,
    type: str,  # noqa: A002
    time: datetime | None = None,
    subject: str | None = None,
    datacontenttype: str | None = None,
    dataschema: str | None = None,
    extensions: Mapping[str, Value] | None = None,
) -> tuple[tuple[str, str], ...]:
    """The headers in a fixed order, extensions by name; raises RecordRejected naming the attribute."""
    headers = [
        (f"{PREFIX}specversion", SPEC_VERSION),
        (f"{PREFIX}id", _string("id", id)),
        (f"{PREFIX}source", uri_reference(_string("source", source))),
        (f"{PREFIX}type", _string("type", type)),
    ]
    if time is not None:
        headers.append((f"{PREFIX}time", _timestamp("time", time)))
    if subject is not None:
        headers.append((f"{PREFIX}subject", _string("subject", subject)))
    if dataschema is not None:
        headers.append((f"{PREFIX}dataschema", _uri("dataschema", dataschema)))
    for name, value in sorted((extensions or {}).items()):
        if not isinstance(name, str) or not _NAME.fullmatch(name) or name in _CORE:
            _refuse(
                repr(name), "is not a valid extension name", "lower-case ASCII letters and digits; none of the spec's"
            )
        headers.append((PREFIX + name, _canonical(name, value)))
    if datacontenttype is not None:
        if not _MEDIA_TYPE.fullmatch(_string("datacontenttype", datacontenttype)):
            _refuse("datacontenttype", f"is {datacontenttype!r}, not a media type")
        headers.append((CONTENT_TYPE, datacontenttype))
    return tuple(headers)


def uri_reference(text: str) -> str:
    """The text with characters not allowed in a URI reference percent-encoded (RFC 3986); valid text is unchanged."""
    text = _STRAY_PERCENT.sub("%25", text)
    found = _AUTHORITY.match(text)
    authority = found.group() if found else ""
    path, hash_sign, fragment = text[len(authority) :].partition("#")
    return (
        quote(authority, safe=_URI_CHARACTERS + "[]")  # brackets are only for IPv6 addresses
        + quote(path, safe=_URI_CHARACTERS)
        + hash_sign
        + quote(fragment, safe=_URI_CHARACTERS)
    )


def _uri(name: str, text: str) -> str:
    if not _SCHEME.match(_string(name, text)):
        _refuse(name, f"is {text!r}, not an absolute URI")
    return uri_reference(text)


def _canonical(name: str, value: Value) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        if not -(2**31) <= value < 2**31:
            _refuse(name, f"is {value}, which does not fit into 32 bits", "give a larger number as a str")
        return str(value)
    if isinstance(value, bytes):
        return b64encode(value).decode()
    if isinstance(value, datetime):
        return _timestamp(name, value)
    return _string(name, value, empty=True)


def _timestamp(name: str, time: datetime) -> str:
    if not isinstance(time, datetime) or time.tzinfo is None:
        _refuse(name, "is not a datetime with a time zone")
    # RFC 3339 has no offsets with seconds, but historical time zones do.
    return time.astimezone(UTC).isoformat().replace("+00:00", "Z")


def _string(name: str, text: object, *, empty: bool = False) -> str:
    if not isinstance(text, str):
        _refuse(name, f"is of type {text.__class__.__name__}, not str")
    if not text and not empty:
        _refuse(name, "is empty")
    if found := _FORBIDDEN.search(text):
        _refuse(name, f"contains the character U+{ord(found.group()):04X}, which is not allowed in an attribute")
    return text


def _refuse(name: str, problem: str, hint: str | None = None) -> NoReturn:
    raise RecordRejected(f"the CloudEvents attribute {name} {problem}", hint=hint)


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CloudEvents:
    """Every record is a CloudEvent 1.0 in binary content mode.

    `source` and `id` together must be unique: repeats of one event have the same. `type` is for records without one.
    `now` and `new_id` are called for each record without a time or id of its own.
    """

    source: str
    type: str | None = None
    dataschema: str | None = None
    now: Callable[[], datetime] = lambda: datetime.now(UTC)
    new_id: Callable[[], str] = lambda: str(uuid4())


class Records(Generic[T]):
    """Makes records; threads may share it."""

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
        """A record for `stash`; raises RecordRejected, for example SerializationFailed. `value=None` is a tombstone.

        The parameters after `partition` are for CloudEvents. Headers have this order: the caller's, the serialiser's,
        those of the event.
        """
        written = self._serializer.serialize(topic, value) if value is not None else None
        added = written.headers if written is not None else ()
        if (events := self._events) is not None:
            for name, _ in (*headers, *added):
                if name.lower() == CONTENT_TYPE or name.startswith(PREFIX):
                    raise RecordRejected(
                        f"header {name!r} belongs to the CloudEvent", hint="give it as an attribute instead"
                    )
            kind = type if type is not None else events.type
            if kind is None:
                raise RecordRejected("a CloudEvent needs a type, but none was given", hint="make(…, type=…)")
            added += cloud_event_headers(
                id=id if id is not None else events.new_id(),
                source=events.source,
                type=kind,
                time=time if time is not None else events.now(),
                subject=subject,
                datacontenttype=self._serializer.content_type if written is not None else None,
                dataschema=events.dataschema,
                extensions=extensions,
            )
        elif any(attribute is not None for attribute in (type, id, time, subject, extensions)):
            raise RecordRejected(
                "attributes of a CloudEvent were given, but cloud_events was not",
                hint="Records(…, cloud_events=CloudEvents(source))",
            )
        return OutboxRecord(topic, key, written.value if written is not None else None, (*headers, *added), partition)
