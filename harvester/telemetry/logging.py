"""Formats log lines, including the Kafka client's: for people on a terminal, as JSON elsewhere.

Everything goes to the standard logger `harvester` or to one passed by the host. Hosts with their own logger format its
lines themselves: there, what `logger_for` adds precedes the message, and is in the record's `instance` and `shard`
attributes.

A reader that goes away (a closed pipe, a terminal that hung up) ends the output, never the process.
"""

from __future__ import annotations

import errno
import json as json_module
import logging
import sys
import traceback
from collections.abc import Callable, Mapping, MutableMapping
from datetime import UTC, datetime
from typing import Any, TextIO

from harvester.errors import HarvesterError

LOGGER = "harvester"
TRACE = 5
LEVELS: Mapping[str, int] = {
    "trace": TRACE,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_OWN = frozenset({"instance", "shard", "bare_message"})

logging.addLevelName(TRACE, "TRACE")


def configure(level: str | int, *, json: bool | None = None, name: str, stream: TextIO | None = None) -> logging.Logger:
    """Send the logger `harvester` to `stream` (default: standard error, looked up at every line) and return it.

    `level`: one of LEVELS, in any case, or a number. `json`: None means lines for people if the stream is a terminal.
    `name`: the instance's, for lines that come from no adapter. Calling it again replaces the earlier configuration.
    """
    number = level if isinstance(level, int) else LEVELS[level.lower()]
    if json is None:
        json = not _is_terminal(stream if stream is not None else sys.stderr)
    handler = _Handler(stream)
    handler.setFormatter(_JsonFormatter(name, number) if json else _HumanFormatter(name, number))
    logger = logging.getLogger(LOGGER)
    for old in [old for old in logger.handlers if isinstance(old, _Handler)]:
        logger.removeHandler(old)
    logger.addHandler(handler)
    logger.setLevel(number)
    logger.propagate = False
    return logger


def logger_for(base: logging.Logger, name: str, shard: int | None = None) -> logging.LoggerAdapter[logging.Logger]:
    """The logger of an instance, or of one of its shards; accepts `extra=` like any other."""
    return _Named(base, name, shard)


class _Named(logging.LoggerAdapter[logging.Logger]):
    """Puts the source into the record and, for formatters that do not know it, in front of the message."""

    def __init__(self, base: logging.Logger, name: str, shard: int | None) -> None:
        super().__init__(base, {})
        self._own = {"instance": name, "shard": shard}
        self._who = _who(name, shard).replace("%", "_")  # it becomes part of a possible %-format

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        kwargs["extra"] = {**(kwargs.get("extra") or {}), **self._own, "bare_message": msg}
        return f"[{self._who}] {msg}", kwargs


_PASSING = {errno.ENOSPC, errno.EDQUOT, errno.EAGAIN}


class _Handler(logging.StreamHandler[TextIO]):
    """Writes to the given stream, or to the current standard error; falls silent when nobody reads.

    A line for which there is no room at the moment, as on a full disk, is lost.
    """

    def __init__(self, stream: TextIO | None) -> None:
        super().__init__(stream if stream is not None else sys.stderr)
        self._follow_stderr = stream is None
        self._closed_at_other_end = False

    def emit(self, record: logging.LogRecord) -> None:
        if self._closed_at_other_end:
            return
        if self._follow_stderr:
            self.stream = sys.stderr
        try:
            line = self.format(record)
        except Exception as error:  # noqa: BLE001 - a wrong log call must not end what it reports on
            line = f"{record.levelname} a log line could not be written: {record.msg!r}: {error!r}"
        try:
            try:
                self.stream.write(line + self.terminator)
            except UnicodeEncodeError:
                self.stream.write(line.encode("ascii", "backslashreplace").decode() + self.terminator)
            self.stream.flush()
        except (OSError, ValueError, AttributeError) as error:
            # EPIPE, EIO, a closed file, or no standard error at all: trying again would fail at every line.
            self._closed_at_other_end = not (isinstance(error, OSError) and error.errno in _PASSING)


class _Fields(logging.Formatter):
    """The base of both formatters."""

    def __init__(self, name: str, level: int) -> None:
        super().__init__()
        self._name = name
        self._tracebacks_for_all = level <= logging.DEBUG

    def _message(self, record: logging.LogRecord) -> str:
        bare = getattr(record, "bare_message", None)
        if bare is None:
            return record.getMessage()
        return str(bare) % record.args if record.args else str(bare)

    def _extra(self, record: logging.LogRecord) -> dict[str, Any]:
        return {key: value for key, value in vars(record).items() if key not in _STANDARD and key not in _OWN}

    def _error(self, record: logging.LogRecord) -> str | None:
        """The exception as text: one line if it was foreseen, the whole traceback if it is a bug."""
        if not record.exc_info or record.exc_info[1] is None:
            return None
        error = record.exc_info[1]
        if isinstance(error, HarvesterError) and not self._tracebacks_for_all:
            return f"{error}; {error.hint}" if error.hint else str(error)
        return "".join(traceback.format_exception(error)).rstrip()


class _JsonFormatter(_Fields):
    """One object per line: at (UTC), level, name, shard, logger, message, the contents of `extra`, error."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, Any] = {
            "at": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "name": getattr(record, "instance", self._name),
            "shard": getattr(record, "shard", None),
            "logger": record.name,
            "message": self._message(record),
        }
        line |= {key: value for key, value in self._extra(record).items() if key not in line}
        error = self._error(record)
        if error is not None:
            line["error"] = error
        return json_module.dumps(line, default=str)


class _HumanFormatter(_Fields):
    """`time LEVEL name[shard] message key=value`; only the traceback of a bug takes more than one line."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created).astimezone()
        who = _who(getattr(record, "instance", self._name), getattr(record, "shard", None))
        parts = [
            at.isoformat(sep=" ", timespec="milliseconds")[:23],
            f"{record.levelname:<7}",
            _printable(who),
            _printable(self._message(record)),
            *(_printable(f"{key}={value}") for key, value in self._extra(record).items()),
        ]
        error = self._error(record)
        if error is None:
            return " ".join(parts)
        foreseen = record.exc_info is not None and isinstance(record.exc_info[1], HarvesterError)
        if foreseen and not self._tracebacks_for_all:
            return " ".join([*parts, f"({_printable(error)})"])
        return "\n    ".join([" ".join(parts), *error.splitlines()])


def _who(name: str, shard: int | None) -> str:
    return name if shard is None else f"{name}[{shard}]"


def _printable(text: str) -> str:
    """Foreign text must not start a new line, or control the terminal."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # closed
        return False


class ClientLog:
    """Receives the Kafka client's lines, as the logger required by confluent_kafka.

    Each is logged one level lower than the client intends: it reports every broken connection as an error although it
    reconnects by itself, and what matters reaches the relay as a failed delivery or a trouble.
    """

    def __init__(self, write: Callable[[int, str], None]) -> None:
        self._write = write

    def log(self, level: int, message: str, *arguments: Any) -> None:
        """Called by the client from within poll()."""
        text = message % arguments if arguments else message
        self._write(max(logging.DEBUG, level - 10), text.strip())
