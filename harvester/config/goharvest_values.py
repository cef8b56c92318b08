"""Values of a goharvest configuration as ours: durations of Go, levels of Scribe, data sources of lib/pq (pure)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import timedelta
from fractions import Fraction
from urllib.parse import parse_qsl, quote

from psycopg import ProgrammingError
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import Conninfo

from harvester.config.durations import format_duration

_UNIT_NS = {"ns": 1, "us": 1_000, "µs": 1_000, "μs": 1_000, "ms": 10**6, "s": 10**9, "m": 60 * 10**9, "h": 3600 * 10**9}
_TERM = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(ns|us|µs|μs|ms|s|m|h)")
_LEVELS = {"trace": "trace", "debug": "debug", "info": "info", "warn": "warning", "error": "error", "off": "error",
           "all": "trace"}  # fmt: skip
_KEYWORDS = frozenset(option.keyword.decode() for option in Conninfo.get_defaults())
# lib/pq's own; libpq has nothing like them.
_PQ_ONLY = frozenset({"binary_parameters", "disable_prepared_binary_result", "sslinline", "krbspn"})
_PLAIN = "/:,@"  # of a URL's parameters; all else is percent-encoded
_NOT_UNDERSTOOD = "is no connection string that libpq understands"


def duration(value: object) -> str:
    """A duration as Go writes it (`1m30s`), or as it keeps it (nanoseconds); raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError(f"{value!r} is no duration")  # noqa: TRY004 - as for a text that is none
    if isinstance(value, int):
        return _format(Fraction(value))
    text, total, at = value.strip().removeprefix("+"), Fraction(0), 0
    if text == "0":  # the only number that needs no unit
        return _format(total)
    while at < len(text) and (term := _TERM.match(text, at)):
        total += Fraction(term[1].rstrip(".") or "0") * _UNIT_NS[term[2]]
        at = term.end()
    if not text or at != len(text):
        raise ValueError(f"{value!r} is no duration")
    return _format(total)


def is_off(value: object) -> bool:
    """Whether this level logs nothing; without quotes it is False to YAML."""
    return value is False or str(value).lower() == "off"


def level(value: object) -> str:
    """A level of logging; raises ValueError."""
    found = _LEVELS.get("off" if is_off(value) else str(value).lower())
    if found is None:
        raise ValueError(f"{value!r} is no level")
    return found


def data_source(text: str) -> tuple[str, list[str]]:
    """A data source of lib/pq as one that libpq understands alike, and notes on what was changed.

    Raises ValueError, without any part of the text, where it is no connection string.
    """
    text, notes = text.strip(), list[str]()
    if text.startswith(("postgres://", "postgresql://")):
        address, _, query = text.partition("?")
        # The first of several, and none that is empty, as lib/pq has it; a + is a space there, and not to libpq.
        given: dict[str, str] = {}
        for name, value in parse_qsl(query):
            given.setdefault(name, value)
        pairs = _adapted(given, notes, at_home=not _names_host(address))
        made = f"{address}?" + "&".join(f"{quote(name)}={quote(value, safe=_PLAIN)}" for name, value in pairs.items())
    else:
        given, rest = _pairs(text, notes)
        if rest:
            raise ValueError("is no connection string of the form key=value")
        try:
            made = make_conninfo("", **_adapted(given, notes))
        except ProgrammingError:
            raise ValueError(_NOT_UNDERSTOOD) from None
    try:
        conninfo_to_dict(made)
    except ProgrammingError:
        raise ValueError(_NOT_UNDERSTOOD) from None
    return made, notes


def _names_host(address: str) -> bool:
    place = address.partition("//")[2].partition("/")[0].rpartition("@")[2]
    return bool(place.partition(":")[0])


def _adapted(pairs: Mapping[str, str], notes: list[str], *, at_home: bool = True) -> dict[str, str]:
    """Parameters of lib/pq as those of libpq. `at_home`: they alone can name a host."""
    for name in sorted(_PQ_ONLY & set(pairs)):
        notes.append(f"{name} left out: only goharvest's driver knows it")
    # lib/pq hands what it does not know to the server, as a setting of the session.
    runtime = {name: value for name, value in pairs.items() if name not in _KEYWORDS | _PQ_ONLY}
    found = {name: value for name, value in pairs.items() if name in _KEYWORDS}
    if runtime:
        options = " ".join(f"-c {name}={_escaped(value)}" for name, value in runtime.items())
        found["options"] = f"{found['options']} {options}" if found.get("options") else options
        notes.append(f"{', '.join(runtime)} given as options: libpq takes settings of the session there")
    if at_home and not found.get("host"):
        found = {"host": "localhost", **{name: value for name, value in found.items() if name != "host"}}
        notes.append("host=localhost added: the default of goharvest's driver; that of libpq is a socket")
    if not found.get("sslmode"):
        found["sslmode"] = "require"
        notes.append("sslmode=require added: the default of goharvest's driver; that of libpq asks for less")
    return found


_PAIR = re.compile(r"\s*([^\s=]+)\s*=(\s*)('(?:[^'\\]|\\.)*'|(?!')(?:[^\s\\]|\\.)*)", re.DOTALL)
_NEXT = re.compile(r"([a-z_]+)=")


def _pairs(text: str, notes: list[str]) -> tuple[dict[str, str], str]:
    """The parameters as lib/pq reads them, and the text that is none.

    Blanks behind = are skipped, so in `password= dbname=x` the password is `dbname=x`, and no dbname is given.
    """
    found: dict[str, str] = {}
    at = 0
    while pair := _PAIR.match(text, at):
        name, gap, value = pair.groups()
        at = pair.end()
        found[name] = re.sub(r"\\(.)", r"\1", value[1:-1] if value.startswith("'") else value, flags=re.DOTALL)
        taken = _NEXT.match(value) if gap else None
        if taken is not None and taken[1] in _KEYWORDS:
            notes.append(
                f"{name} takes the text behind it for its value, up to the next blank, so {taken[1]} is not given:"
                " goharvest's driver reads it like that. If it was to be empty, correct both here"
            )
    return found, text[at:].strip()


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace(" ", "\\ ")


def _format(nanoseconds: Fraction) -> str:
    microseconds = nanoseconds / 1_000
    if microseconds.denominator != 1 or microseconds < 0:
        raise ValueError("is finer than a microsecond, or negative")
    return format_duration(timedelta(microseconds=int(microseconds)))
