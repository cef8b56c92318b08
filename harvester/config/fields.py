"""The kinds of values that settings accept, their constraints, and defaults that depend on the process.

A kind is an annotated type, such as `Topic`, or a validator with limits, such as `whole_number(1, 256)`.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import PurePath
from typing import Annotated

from pydantic import BeforeValidator, PlainSerializer

from harvester.claim_check.reference import FORM as STORE_FORM
from harvester.claim_check.reference import read_url
from harvester.config.dsn import FORM as DSN_FORM
from harvester.config.dsn import parse_dsn
from harvester.config.durations import FORM as DURATION_FORM
from harvester.config.durations import bare_number_hint, format_duration, parse_duration
from harvester.config.oauth import read_hook_name
from harvester.config.problems import echo, refuse
from harvester.errors import SchemaError
from harvester.outbox.tables import OutboxTable

MAX_SESSION_TIMEOUT = timedelta(hours=1)  # librdkafka's limit
_MAX_HEADER_BYTES = 255
_TOPIC = re.compile(r"[A-Za-z0-9._-]{1,249}", re.ASCII)
_LABEL = "[A-Za-z0-9_-]{1,63}"  # Python looks up no host with an empty or longer one
_LISTEN = re.compile(
    rf"(?:(?=[^:]{{1,253}}:){_LABEL}(?:\.{_LABEL})*\.?|\[[0-9A-Fa-f:.%]{{2,60}}\]):([0-9]{{1,5}})", re.ASCII
)
_HIGHEST_PORT = 65_535
_LONGEST_SOCKET_BYTES = 107  # unix(7)
_LONGEST_NAME = 200
_LONGEST_GROUP = 255
_as_text = PlainSerializer(format_duration, return_type=str, when_used="json")


def duration_up_to(longest: timedelta) -> BeforeValidator:
    """Text with a unit, or a timedelta, above zero and no longer than `longest`."""

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

    return BeforeValidator(read)


def whole_number(low: int, high: int) -> BeforeValidator:
    """An integer within limits; also as decimal text, so that `${SHARDS}` can provide one."""

    def read(value: object) -> int:
        allowed = f"a whole number from {low} to {high}"
        if isinstance(value, str) and re.fullmatch(r"[0-9]{1,18}", value, re.ASCII):
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool):
            refuse("must be a whole number", allowed)
        if not low <= value <= high:
            refuse(f"{value if abs(value) < 10**18 else 'it'} is out of range", allowed)
        return value

    return BeforeValidator(read)


def one_of(*allowed: str) -> BeforeValidator:
    """One of some words, in any case."""

    def read(value: object) -> str:
        text = _text(value).strip().lower()
        if text not in allowed:
            refuse(f"{echo(value)} is not known", ", ".join(allowed))
        return text

    return BeforeValidator(read)


def _printable(longest: int) -> Callable[[object], str]:
    def read(value: object) -> str:
        text = _text(value)
        if not text.strip() or len(text) > longest or not text.isprintable():
            refuse("is empty, too long or not printable", f"1 to {longest} printable characters")
        return text

    return read


def _text(value: object) -> str:
    if not isinstance(value, str):
        refuse("must be text", "a string in quotes")
    return value


def _group_id(value: object) -> str:
    if value == "":
        refuse(
            "is not set, and cannot be derived: the program's file name does not name a service",
            "a name for the service, the same in all its processes",
        )
    return _printable(_LONGEST_GROUP)(value)


def is_topic(text: str) -> bool:
    """Whether Kafka accepts this as the name of a topic."""
    return _TOPIC.fullmatch(text) is not None and text not in (".", "..")


def _topic(value: object) -> str:
    text = _text(value)
    if not is_topic(text):
        refuse(
            f"{echo(text)} is not a Kafka topic name (unset, it is leader_group_id + '.neli')",
            "1 to 249 of A-Z a-z 0-9 . _ -",
        )
    return text


def _topic_or_none(value: object) -> str:
    text = _text(value)
    if text and not is_topic(text):
        refuse(f"{echo(text)} is not a Kafka topic name", '1 to 249 of A-Z a-z 0-9 . _ -, or "" for none')
    return text


def _header_name(value: object) -> str:
    text = _text(value)
    if len(text.encode()) > _MAX_HEADER_BYTES or "\x00" in text:
        refuse(f"{echo(text)} cannot name a header", f'at most {_MAX_HEADER_BYTES} bytes, or "" for none')
    return text


def _table_name(value: object) -> str:
    text = _text(value)
    try:
        OutboxTable.parse(text)
    except SchemaError as error:
        refuse(error.message, error.hint)
    return text


def _listen(value: object) -> str:
    text = _text(value).strip()
    if text.lower() in ("", "off"):
        return "off"
    found = _LISTEN.fullmatch(text)
    if found is None or int(found[1]) > _HIGHEST_PORT:
        refuse(f"{echo(text)} is not an address", '"127.0.0.1:9464", "[::1]:9464", "0.0.0.0:9464" or "off"')
    return text


def _control_socket(value: object) -> str:
    text = _text(value).strip()
    if text.lower() in ("", "off", "auto"):
        return text.lower() or "off"
    if not text.startswith("/") or text.endswith("/") or not text.isprintable():
        refuse(f"{echo(text)} is not a path for a socket", '"auto", "off", or an absolute path')
    if len(text.encode()) > _LONGEST_SOCKET_BYTES:
        refuse("is too long for a socket", f"a path of at most {_LONGEST_SOCKET_BYTES} bytes")
    return text


def _switch(value: object) -> bool:
    if isinstance(value, bool):
        return value
    text = value.strip().lower() if isinstance(value, str) else ""
    if text not in ("true", "false"):
        refuse("must be true or false", "true or false")
    return text == "true"


def _data_source(value: object) -> str:
    text = _text(value)
    try:
        parse_dsn(text)
    except ValueError as error:
        refuse(str(error), DSN_FORM)  # contains no part of the text
    return text


def _store_url(value: object) -> str:
    text = _text(value).strip()
    try:
        return read_url(text) if text else ""
    except ValueError as error:
        refuse(str(error), STORE_FORM)


def _matching(form: str, what: str, allowed: str) -> Callable[[object], str]:
    def read(value: object) -> str:
        text = _text(value).strip()
        if text and not re.fullmatch(form, text, re.ASCII):
            refuse(f"{echo(text)} is not {what}", allowed)
        return text

    return read


Duration = Annotated[timedelta, duration_up_to(timedelta(hours=24)), _as_text]
SessionDuration = Annotated[timedelta, duration_up_to(MAX_SESSION_TIMEOUT), _as_text]
Retention = Annotated[timedelta, duration_up_to(timedelta(days=3650)), _as_text]
Switch = Annotated[bool, BeforeValidator(_switch)]  # also as text, so that `${TRACING:-false}` can provide one
Name = Annotated[str, BeforeValidator(_printable(_LONGEST_NAME))]
GroupId = Annotated[str, BeforeValidator(_group_id)]
Topic = Annotated[str, BeforeValidator(_topic)]
TopicOrNone = Annotated[str, BeforeValidator(_topic_or_none)]
HeaderName = Annotated[str, BeforeValidator(_header_name)]  # empty: none
TableName = Annotated[str, BeforeValidator(_table_name)]  # as in SQL
DataSource = Annotated[str, BeforeValidator(_data_source)]
ListenAddress = Annotated[str, BeforeValidator(_listen)]  # HOST:PORT, an IPv6 host in brackets, or "off"
SocketPath = Annotated[str, BeforeValidator(_control_socket)]  # "auto", "off", or a path
FunctionName = Annotated[str, BeforeValidator(read_hook_name)]
StoreUrl = Annotated[str, BeforeValidator(_store_url)]  # empty: none
Endpoint = Annotated[
    str,
    BeforeValidator(
        _matching(r"https?://[^\s/@?#]+/?", "the address of a server", '"https://host", "http://host:9000"')
    ),
]
Region = Annotated[str, BeforeValidator(_matching(r"[A-Za-z0-9-]{1,63}", "a region", 'such as "eu-central-1"'))]


# A name that does not identify the service (an interpreter, an application server) is not used as default: two services
# with the same group id would starve each other.
_SUFFIXES = frozenset({".py", ".pyw", ".pyz", ".pyc", ".exe"})
_GENERIC = re.compile(
    r"(python|pypy|ipython|bpython|ptpython)[0-9.]*t?|"
    r"-c|-m|-|__main__|"
    r"gunicorn|uvicorn|hypercorn|daphne|granian|uwsgi|mod_wsgi.*|waitress-serve|celery|rq|dramatiq|arq|huey_consumer|"
    r"flask|django-admin|fastapi|airflow|spark-submit|"
    r"jupyter.*|ipykernel.*|colab_kernel_launcher|pydevconsole|pydevd|debugpy|"
    r"pytest|py\.test|nosetests|tox|nox|coverage|unittest|pdb|runpy|"
    r"multiprocessing.*|multiprocess.*",
    re.IGNORECASE,
)


def group_id_from(main_script: str, main_module: str | None) -> str:
    """A group id from `sys.argv[0]` and the name of the module run with `-m`; empty if neither identifies a service.

    The file name without its Python suffix, with everything outside `A-Za-z0-9._-` replaced by `_`.
    """
    if main_module:
        name = main_module.removesuffix(".__main__").split(".")[0]
        name = "harvester" if name == "harvester_cli" else name
    else:
        path = PurePath(main_script)
        name = path.stem if path.suffix.lower() in _SUFFIXES else path.name
    name = re.sub(r"[^A-Za-z0-9._-]", "_", name)[:_LONGEST_NAME]
    return "" if not name.strip("._-") or _GENERIC.fullmatch(name) else name


def default_group_id() -> str:
    """`group_id_from` this process."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return group_id_from(sys.argv[0] if sys.argv else "", getattr(spec, "name", None))


def default_name() -> str:
    """`{hostname}_{pid}_{UNIX time in seconds}`."""
    return f"{socket.gethostname()}_{os.getpid()}_{int(time.time())}"
