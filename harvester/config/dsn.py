"""Parses the data source: a PostgreSQL connection string, as `key=value` pairs or as a URI, with one or more hosts.

Messages never repeat any of the text: in an invalid string any part may belong to the password.

One interpretation differs from libpq's. In the default, `password= dbname=postgres`, libpq skips the blank after `=`
and finds the password "dbname=postgres" and no database name. Here, if a value after such a blank is itself `<known
parameter>=…`, the preceding value counts as empty, as the writer intended.
"""

from __future__ import annotations

import difflib
import re

from psycopg import ProgrammingError
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import Conninfo

from harvester.config.kafka_options import MASK

CONNECT_TIMEOUT_S = 10
_SECRETS = frozenset({"password", "sslpassword", "scram_client_key", "scram_server_key", "oauth_client_secret"})
_WRITABLE = ("read-write", "primary", "any")
_SESSION_ATTRS = (*_WRITABLE, "read-only", "standby", "prefer-standby")
_KEYWORDS = frozenset(option.keyword.decode() for option in Conninfo.get_defaults())
_PAIR = re.compile(r"""\s*(?P<key>[^\s='"]+)\s*=(?P<gap>\s*)(?P<value>'(?:[^'\\]|\\.)*'|(?:[^\s\\]|\\.)*)""", re.DOTALL)
_STARTS_PAIR = re.compile(r"([a-z_]+)\s*=")
_APPLICATION_NAME_BYTES = 63
FORM = '"host=db port=5432 user=app dbname=app" or "postgresql://app@db:5432/app"; several hosts: "host=a,b"'


def parse_dsn(text: str) -> dict[str, str]:
    """The parameters in the string; raises ValueError, without quoting any of it, if it is invalid."""
    uri = text.strip().startswith(("postgresql://", "postgres://"))
    if "\x00" in text:  # libpq would use only the text before it
        raise ValueError("contains a character that is not allowed in a connection string")
    try:
        parsed = conninfo_to_dict(text if uri else _with_empty_values(text))
    except ProgrammingError as error:
        # The original error quotes what may be the password: it must not be chained.
        raise ValueError(_without_text(str(error))) from None
    except (UnicodeError, ValueError):
        raise ValueError("contains a character that is not allowed in a connection string") from None
    params = {key: str(value) for key, value in parsed.items() if value is not None}
    _check(params, uri=uri)
    return params


def effective_dsn(text: str, *, application_name: str) -> str:
    """A conninfo for connecting: only to a writable server, with an application name and a connect timeout."""
    params = {
        "target_session_attrs": "read-write",
        "connect_timeout": str(CONNECT_TIMEOUT_S),
        "application_name": application_name.encode()[:_APPLICATION_NAME_BYTES].decode(errors="ignore"),
    } | parse_dsn(text)
    return make_conninfo("", **params)


def mask_dsn(text: str) -> str:
    """The connection string in a form that may be shown: always `key=value`."""
    try:
        params = parse_dsn(text)
    except ValueError:
        return MASK
    return make_conninfo("", **{key: MASK if key in _SECRETS and value else value for key, value in params.items()})


def without_password(text: str) -> dict[str, str]:
    """Everything except the password and the file that holds it, for comparing two strings."""
    return {key: value for key, value in parse_dsn(text).items() if key not in ("password", "passfile")}


def _with_empty_values(text: str) -> str:
    pieces: list[str] = []
    at = 0
    while pair := _PAIR.match(text, at):
        following = _STARTS_PAIR.match(pair["value"])
        if pair["gap"] and following and following[1] in _KEYWORDS:
            pieces.append(f"{pair['key']}=''")
            at = pair.end("gap")
        else:
            pieces.append(f"{pair['key']}={pair['value']}")
            at = pair.end()
    return " ".join([*pieces, text[at:]])


def _without_text(message: str) -> str:
    if "unterminated quoted string" in message:
        return "has a quote that is never closed"
    if 'missing "="' in message:
        return "has a word without '='; a value with blanks needs single quotes"
    if "percent-encoded" in message:
        return "has a bad %-escape; in a URI, write % as %25"
    if "invalid connection option" in message or "invalid URI query parameter" in message:
        named = re.search(r'"([^"]*)"', message)
        close = difflib.get_close_matches(named[1], sorted(_KEYWORDS), n=1) if named else []
        return "has a parameter unknown to PostgreSQL" + (f" (did you mean {close[0]!r}?)" if close else "")
    return "is not a PostgreSQL connection string"


def _check(params: dict[str, str], *, uri: bool) -> None:
    if uri and any("@" in params.get(key, "") for key in ("host", "port", "dbname")):
        raise ValueError(
            "has an '@' outside the login; in a URI, write @ : / ? # % of a password as %40 %3A %2F %3F %23 %25"
        )
    ports = params.get("port", "").split(",") if params.get("port") else []
    if any(port and not (port.isascii() and port.isdigit() and 0 < int(port[:6]) < 65536) for port in ports):
        raise ValueError("has a port that is not a number from 1 to 65535")
    hosts = max(len(params.get(key, "").split(",")) for key in ("host", "hostaddr"))
    if len(ports) > 1 and len(ports) != hosts:
        raise ValueError(f"names {len(ports)} ports for {hosts} host(s); give one port, or one per host")
    timeout = params.get("connect_timeout", "0")
    if not re.fullmatch(r"-?[0-9]{1,9}", timeout):
        raise ValueError("has a connect_timeout that is not a whole number of seconds")
    attrs = params.get("target_session_attrs", "read-write")
    if attrs not in _SESSION_ATTRS:
        raise ValueError(f"has an unknown target_session_attrs; allowed: {', '.join(_WRITABLE)}")
    if attrs not in _WRITABLE:
        raise ValueError(
            f"asks for a read-only server (target_session_attrs), but the relay writes; allowed: {', '.join(_WRITABLE)}"
        )
