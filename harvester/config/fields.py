"""The kinds of values that settings have, each with what is allowed: durations, counts, names, tables of options."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated

from pydantic import BeforeValidator, PlainSerializer

from harvester.config.dsn import FORM as DSN_FORM
from harvester.config.dsn import parse_dsn
from harvester.config.durations import FORM as DURATION_FORM
from harvester.config.durations import bare_number_hint, format_duration, parse_duration
from harvester.config.problems import echo, refuse
from harvester.errors import SchemaError
from harvester.outbox.tables import OutboxTable

MAX_DURATION = timedelta(hours=24)
MAX_RETENTION = timedelta(days=3650)
MAX_SESSION_TIMEOUT = timedelta(hours=1)  # librdkafka's bound
_MAX_HEADER_BYTES = 255
_TOPIC = re.compile(r"[A-Za-z0-9._-]{1,249}", re.ASCII)
_LISTEN = re.compile(r"(?:[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.%]{2,60}\]):([0-9]{1,5})", re.ASCII)
_HIGHEST_PORT = 65_535
_LONGEST_SOCKET_BYTES = 107  # unix(7)
_LONGEST_NAME = 200
_LONGEST_GROUP = 255


def duration_up_to(longest: timedelta) -> Callable[[object], timedelta]:
    """A validator: text with a unit, or a timedelta, above zero and no longer than `longest`."""

    def read(value: object) -> timedelta:
        if isinstance(value, timedelta):
            duration = value
        elif isinstance(value, str):
            try:
                duration = parse_duration(value)
            except ValueError as error:
                refuse(str(error), DURATION_FORM)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            refuse(f"{value} has no unit; write {bare_number_hint(value)}", DURATION_FORM)
        else:
            refuse("must be a duration", DURATION_FORM)
        if not timedelta(0) < duration <= longest:
            refuse(f"{echo(value)} is out of range", f"above 0, up to {format_duration(longest)}")
        return duration

    return read


@dataclass(frozen=True, slots=True)
class Conflict:
    """Stands for the value of a setting that was given under two names, differently."""

    alias: str


def whole_number(low: int, high: int) -> Callable[[object], int]:
    """A validator: an integer within bounds; also as decimal text, so that `${SHARDS}` can give one."""

    def read(value: object) -> int:
        allowed = f"a whole number from {low} to {high}"
        if isinstance(value, Conflict):
            refuse(f"and its alias {value.alias!r} differ", "one of the two")
        if isinstance(value, str) and re.fullmatch(r"[0-9]{1,18}", value, re.ASCII):
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool):
            refuse("must be a whole number", allowed)
        if not low <= value <= high:
            refuse(f"{value if abs(value) < 10**18 else 'it'} is out of range", allowed)
        return value

    return read


def _text(value: object) -> str:
    if not isinstance(value, str):
        refuse("must be text", "a string in quotes")
    return value


def _printable(value: object, longest: int) -> str:
    text = _text(value)
    if not text.strip() or len(text) > longest or not text.isprintable():
        refuse("is empty, too long or not printable", f"1 to {longest} printable characters")
    return text


def read_name(value: object) -> str:
    """The instance's name: printable, for log lines."""
    return _printable(value, _LONGEST_NAME)


def read_group_id(value: object) -> str:
    """A group id; empty when none could be derived from the main script."""
    if value == "":
        refuse(
            "is not set, and this program's file name says nothing about the service",
            "a name of the service, the same in all its processes",
        )
    return _printable(value, _LONGEST_GROUP)


def is_topic(text: str) -> bool:
    """Whether Kafka takes this for the name of a topic."""
    return _TOPIC.fullmatch(text) is not None and text not in (".", "..")


def read_topic(value: object) -> str:
    """A legal Kafka topic name."""
    text = _text(value)
    if not is_topic(text):
        refuse(
            f"{echo(text)} is no Kafka topic name (unset, it is leader_group_id + '.neli')",
            "1 to 249 of A-Z a-z 0-9 . _ -",
        )
    return text


def read_notice_topic(value: object) -> str:
    """A legal Kafka topic name, or nothing."""
    text = _text(value)
    if text and not is_topic(text):
        refuse(f"{echo(text)} is no Kafka topic name", '1 to 249 of A-Z a-z 0-9 . _ -, or "" for none')
    return text


def read_header_name(value: object) -> str:
    """The name of the harvester's own header, or nothing."""
    text = _text(value)
    if len(text.encode()) > _MAX_HEADER_BYTES or "\x00" in text:
        refuse(f"{echo(text)} cannot name a header", f'at most {_MAX_HEADER_BYTES} bytes, or "" for none')
    return text


def read_table_name(value: object) -> str:
    """A table name as in SQL."""
    text = _text(value)
    try:
        OutboxTable.parse(text)
    except SchemaError as error:
        refuse(error.message, error.hint)
    return text


def read_listen(value: object) -> str:
    """Where to listen: HOST:PORT, an IPv6 host in brackets, or "off"."""
    text = _text(value).strip()
    if text.lower() in ("", "off"):
        return "off"
    found = _LISTEN.fullmatch(text)
    if found is None or int(found[1]) > _HIGHEST_PORT:
        refuse(f"{echo(text)} is nowhere to listen", '"127.0.0.1:9464", "[::1]:9464", "0.0.0.0:9464" or "off"')
    return text


def read_control_socket(value: object) -> str:
    """Where the control socket is: "auto", "off", or a path."""
    text = _text(value).strip()
    if text.lower() in ("", "off", "auto"):
        return text.lower() or "off"
    if not text.startswith("/") or text.endswith("/") or not text.isprintable():
        refuse(f"{echo(text)} is no place for a socket", '"auto", "off", or an absolute path')
    if len(text.encode()) > _LONGEST_SOCKET_BYTES:
        refuse("is too long for a socket", f"a path of {_LONGEST_SOCKET_BYTES} bytes at the most")
    return text


def read_switch(value: object) -> bool:
    """True or false; also as text, so that `${TRACING:-false}` can give one."""
    if isinstance(value, bool):
        return value
    text = value.strip().lower() if isinstance(value, str) else ""
    if text not in ("true", "false"):
        refuse("must be true or false", "true or false")
    return text == "true"


def read_data_source(value: object) -> str:
    """A connection string; no part of it is ever repeated."""
    text = _text(value)
    try:
        parse_dsn(text)
    except ValueError as error:
        refuse(str(error), DSN_FORM)
    return text


def one_of(*allowed: str) -> Callable[[object], str]:
    """A validator: one of some words, in any case."""
    listed = ", ".join(allowed)

    def read(value: object) -> str:
        text = _text(value).strip().lower()
        if text not in allowed:
            refuse(f"{echo(value)} is not known", listed)
        return text

    return read


_as_text = PlainSerializer(format_duration, return_type=str, when_used="json")
Duration = Annotated[timedelta, BeforeValidator(duration_up_to(MAX_DURATION)), _as_text]
SessionDuration = Annotated[timedelta, BeforeValidator(duration_up_to(MAX_SESSION_TIMEOUT)), _as_text]
Retention = Annotated[timedelta, BeforeValidator(duration_up_to(MAX_RETENTION)), _as_text]
