"""Sessions with PostgreSQL: how they are opened, which outbox they are with, and whether a pooler is in between.

A session of the harvester is writable, uses UTF-8, waits for its commits to be durable, and notices a lost peer within
seconds. psycopg's errors end here: callers see `DatabaseUnavailable` (try again) or `SchemaError` (manual intervention
is needed), never a password.

*Identity* (P9, P35). An id identifies a row only on one server, on one timeline, in one table with one run of its
sequence: `OutboxIdentity`. Sessions compare theirs with the one on which the term was taken.

*Poolers.* The relay needs sessions of its own, not a backend lent for each transaction. Otherwise, session settings
(`synchronous_commit`, timeouts) would apply to another transaction's backend and remain there for its next user;
prepared statements would be unknown; notifications would be lost. Above all, the sessions recorded in the term row
would be backends that others are using, and a new leader ends them (P7).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import conninfo
from psycopg.rows import tuple_row

from harvester.errors import ConfigurationError, DatabaseUnavailable, HarvesterError, Problem, SchemaError
from harvester.outbox.sql.queries import IdSpace, oid_of, read_space
from harvester.outbox.tables import OutboxTable

Connection = psycopg.Connection[tuple[Any, ...]]

# How long a server may send nothing before the session counts as broken. TCP notices a lost peer; but a proxy that has
# lost its own peer is still reachable, and would be waited for indefinitely.
SILENCE_S = 30.0

# A dead peer is noticed after 5 + 3 * 2 = 11 s, whether or not data is under way.
_DEFAULTS: dict[str, str | int] = {
    "connect_timeout": 5,
    "target_session_attrs": "read-write",
    "keepalives": 1,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 11_000,
}

# Settings that defaults of the role or the database could otherwise change. remote_apply promises more than `on`, so it
# may stay; everything else promises less (protocol P1). Marks rely on READ COMMITTED (P3). A row security policy
# created during this session causes an error: rows hidden by it would be mistaken for deleted rows. Times are read, and
# written back (P7), in the form that names their offset instead of a zone that another server may take for another one.
# How long an answer may take is our own decision, statement by statement; sessions that are idle are ours to end.
_SESSION_SQL = """
SELECT pg_is_in_recovery() OR current_setting('transaction_read_only')::boolean, is_pooled,
       set_config('synchronous_commit',
           CASE current_setting('synchronous_commit') WHEN 'remote_apply' THEN 'remote_apply' ELSE 'on' END, only_now),
       set_config('default_transaction_isolation', 'read committed', only_now),
       set_config('standard_conforming_strings', 'on', only_now),
       set_config('row_security', 'off', only_now),
       set_config('DateStyle', 'ISO', only_now),
       set_config('quote_all_identifiers', 'off', only_now),
       (SELECT count(set_config(name, '0', only_now))
        FROM unnest(ARRAY['statement_timeout', 'transaction_timeout', 'idle_session_timeout']) AS name
        WHERE current_setting(name, true) IS NOT NULL)
FROM (SELECT pg_backend_pid() <> $1 AS is_pooled, pg_backend_pid() <> $1 AND NOT $2 AS only_now) AS session
"""

_PREFIX = re.compile(
    r"^(?:connection failed: |connection is bad: )*"
    r'(?:connection to server (?:at|on socket) "[^"]*"(?: \([^)]*\))?(?:, port \d+)? failed: )?'
    r"(?:(?:FATAL|ERROR|PANIC):\s+)?"
)
_ATTEMPTS = re.compile(r"\s*Multiple connection attempts failed\. All failures were:\s*")
_ATTEMPT = re.compile(r"^- host: '?([^',]*)'?, port: '?([^',]*)'?.*?: (conn.*)$", re.MULTILINE)
_HINTS = (
    (re.compile(r"password|authentication|pg_hba", re.I), "check user and password in data_source, and pg_hba.conf"),
    (re.compile(r"role .* does not exist", re.I), "create the role, or correct user in data_source"),
    (re.compile(r"database .* does not exist", re.I), "create the database, or correct dbname in data_source"),
    (re.compile(r"too many (clients|connections)|connection slots", re.I), "raise max_connections of the server"),
    (re.compile(r"translate host name|resolve|not known", re.I), "check the host name in data_source"),
    (re.compile(r"SSL", re.I), "check sslmode and the certificates in data_source"),
)
_READ_ONLY = re.compile(r"session is read-only|hot standby mode|server is in recovery")
_READ_ONLY_HINT = "point data_source at the primary, or list all servers (host=a,b): the writable one is taken"
_NO_PRIMARY_HINT = "promote a standby, or start the primary"
_DEFAULT_HINT = "check that the server runs and that data_source names it"


class _Session(psycopg.Connection[Any]):
    """A session that ends when the server is silent for too long."""

    silence_s = SILENCE_S

    def wait(self, gen: Any, interval: float = 0.1, timeout: float | None = None) -> Any:
        """Like psycopg's, but always with a time limit."""
        try:
            return super().wait(gen, interval, self.silence_s if timeout is None else timeout)
        except psycopg.errors._WaitTimeout:  # the documented exception class
            self.pgconn.finish()  # a late answer would be taken for that of a later statement
            raise psycopg.OperationalError(f"the server said nothing for {self.silence_s:g} s") from None


def connect(
    dsn: str,
    *,
    application_name: str,
    autocommit: bool = True,
    connect_timeout_s: int | None = None,
    silence_s: float = SILENCE_S,
    may_be_lent: bool = False,
) -> Connection:
    """Open a session. Raises DatabaseUnavailable; SchemaError behind a pooler that lends backends; ConfigurationError
    for an invalid DSN.

    `may_be_lent`: behind a pooler of any kind, the session keeps its settings, and is opened.
    Timeouts, keepalives and target_session_attrs in `dsn` are kept; a read-only server is always refused.
    `connect_timeout_s` is per host. If the server sends nothing for `silence_s`, the session ends and the call raises
    psycopg.OperationalError.
    """
    parameters = _parameters(dsn)
    for name, value in _DEFAULTS.items():
        parameters.setdefault(name, value)
    if connect_timeout_s is not None:
        parameters["connect_timeout"] = connect_timeout_s
    parameters["application_name"] = application_name
    parameters["client_encoding"] = "UTF8"
    where = _servers(parameters)
    try:
        connection = _Session.connect("", autocommit=True, row_factory=tuple_row, **parameters)
    except psycopg.Error as error:
        raise unreachable(where, str(error)) from error
    try:
        is_read_only, is_behind = _set_up(connection, is_ours=False)
        if is_behind and not may_be_lent:
            if lends_backends(connection, dsn, application_name):
                raise SchemaError(LENT, hint=LENT_HINT)
            is_read_only, _ = _set_up(connection, is_ours=True)
        if is_read_only:
            raise unreachable(where, "session is read-only")
    except psycopg.Error as error:
        connection.close()
        raise unreachable(where, str(error)) from error
    except HarvesterError:
        connection.close()
        raise
    connection.autocommit = autocommit
    connection.silence_s = silence_s
    return connection


def _set_up(connection: Connection, *, is_ours: bool) -> tuple[bool, bool]:
    """Apply the settings, behind a pooler only if the session `is_ours`.

    Returns whether it allows only reading, and whether there is a pooler.
    """
    row = fetch_row(connection, _SESSION_SQL, connection.info.backend_pid, is_ours)
    return bool(row[0]), bool(row[1])


def server_identity(connection: Connection) -> tuple[int, int] | None:
    """(system_identifier, timeline) of the server, or None if this user may not read it (protocol P9).

    The timeline is that of the WAL being written, which a promotion changes at once; the control file follows only at
    the next checkpoint.
    """
    query = """SELECT (SELECT system_identifier FROM pg_catalog.pg_control_system()),
                      ('x' || substr(pg_walfile_name(pg_current_wal_insert_lsn()), 1, 8))::bit(32)::int"""
    try:
        with connection.transaction():
            row = connection.execute(query).fetchone()
    except psycopg.errors.InsufficientPrivilege:
        return None
    except psycopg.OperationalError as error:
        raise lost(connection, error) from error
    if row is None or row[0] is None:
        return None
    return int(row[0]), int(row[1])


@contextmanager
def database_errors(what: str) -> Iterator[None]:
    """Turns psycopg's errors inside the block into ours; `what` describes the action ("read the term row")."""
    try:
        yield
    except HarvesterError:
        raise
    except psycopg.errors.LockNotAvailable as error:
        raise DatabaseUnavailable(
            f"could not {what}: another transaction has locked the table for too long",
            hint="try again; pg_stat_activity shows long transactions",
        ) from error
    except psycopg.errors.InsufficientPrivilege as error:
        raise SchemaError(
            f"could not {what}: {one_line(error)}",
            hint="let the owner of the schema run it, or grant the privilege",
        ) from error
    except (psycopg.OperationalError, psycopg.InterfaceError) as error:
        # A session that ended, a cancelled statement, a deadlock: a retry may help with all of them.
        raise DatabaseUnavailable(
            f"could not {what}: {one_line(error)}", hint="try again; see the server's log for more"
        ) from error
    except psycopg.Error as error:
        raise SchemaError(f"could not {what}: {one_line(error)}") from error


def lost(connection: psycopg.Connection[Any], error: psycopg.Error) -> DatabaseUnavailable:
    """The error for a session that broke during use."""
    info = connection.info
    where = f"{info.host}:{info.port}" if not connection.closed else "the server"
    return DatabaseUnavailable(f"the session with PostgreSQL at {where} ended: {one_line(error)}")


def one_line(error: BaseException) -> str:
    """The first line of an error, without PostgreSQL's prefix, details and positions."""
    primary = error.diag.message_primary if isinstance(error, psycopg.Error) else None
    text = primary or str(error).strip() or type(error).__name__
    return _PREFIX.sub("", text.splitlines()[0])


def execute(connection: psycopg.Connection[Any], query: str, *values: object) -> psycopg.Cursor[tuple[Any, ...]]:
    """Run a statement in libpq's notation ($1), independent of the connection's factories.

    Per cent signs have no special meaning: the name of a table may contain one.
    """
    return psycopg.RawCursor(connection, row_factory=tuple_row).execute(query, values)


def fetch_row(connection: psycopg.Connection[Any], query: str, *values: object) -> tuple[Any, ...]:
    """The row of a query that always returns one."""
    row = execute(connection, query, *values).fetchone()
    assert row is not None, f"no row returned by {query}"
    return row


def _parameters(dsn: str) -> dict[str, Any]:
    try:
        return dict(conninfo.conninfo_to_dict(dsn))
    except psycopg.ProgrammingError:
        # The error quotes parts of the DSN, possibly of the password: neither its message nor the cause is kept.
        problem = Problem("data_source", "is not a PostgreSQL connection string", "host=… dbname=… or postgresql://…")
        raise ConfigurationError([problem]) from None


def _servers(parameters: dict[str, Any]) -> str:
    """host:port of each server, separated by commas."""
    hosts = str(parameters.get("host") or parameters.get("hostaddr") or "").split(",")
    ports = str(parameters.get("port") or "5432").split(",")
    if len(ports) < len(hosts):
        ports = ports[:1] * len(hosts)
    return ", ".join(f"{host or 'local socket'}:{port}" for host, port in zip(hosts, ports, strict=False))


def unreachable(where: str, text: str) -> DatabaseUnavailable:
    """The error for a connection that could not be opened; `text` is libpq's, of one or more lines."""
    # psycopg lists the attempts after the last error; the first line is from the last server.
    lines = _ATTEMPTS.split(text.strip())[0].strip().splitlines()
    reason = _PREFIX.sub("", lines[0]) if lines else "no reason was given"
    attempts = {f"{host}:{port}": _PREFIX.sub("", why) for host, port, why in _ATTEMPT.findall(text)}
    standbys = [server for server, why in attempts.items() if _READ_ONLY.search(why)]
    if 0 < len(standbys) < len(attempts):
        each = (f"{server}: {why}" for server, why in attempts.items())
        return DatabaseUnavailable(f"no PostgreSQL that accepts writes: {'; '.join(each)}", hint=_NO_PRIMARY_HINT)
    if _READ_ONLY.search(text):
        return DatabaseUnavailable(
            f"PostgreSQL at {where} allows only reading ({reason}): it is a standby or set to read-only",
            hint=_READ_ONLY_HINT,
        )
    hint = next((hint for pattern, hint in _HINTS if pattern.search(reason)), _DEFAULT_HINT)
    return DatabaseUnavailable(f"cannot reach PostgreSQL at {where}: {reason}", hint=hint)


LENT = "a pooler in transaction (or statement) mode is between the harvester and PostgreSQL"
LENT_HINT = "point data_source at PostgreSQL itself, or at a pool in session mode; applications may stay behind it"
_LOOKS = 5  # a pool may have several backends to lend


def is_pooled(connection: psycopg.Connection[Any]) -> bool:
    """Whether there is a pooler of any kind: it gives its clients a pid of its own."""
    return _pid(connection) != connection.info.backend_pid


def lends_backends(connection: psycopg.Connection[Any], dsn: str, application_name: str) -> bool:
    """Whether two simultaneous sessions were served by one backend, or one session by two.

    `dsn` is what `connection` was opened with; it must be in autocommit mode, outside a transaction. If a pooler is
    evident, the check is repeated several times. Raises psycopg's errors.
    """
    ours = _pid(connection)
    for _ in range(_LOOKS if is_pooled(connection) else 1):
        try:
            other = connect(dsn, application_name=application_name, may_be_lent=True)
        except DatabaseUnavailable:
            return False  # a pool in session mode may have none left; one that lends serves another with ours
        with closing(other):
            theirs, again = _pid(other), _pid(connection)
        if theirs in (ours, again) or again != ours:
            return True
    return False


def _pid(connection: psycopg.Connection[Any]) -> int:
    row = connection.execute("SELECT pg_backend_pid()").fetchone()
    return int(row[0]) if row is not None else 0


_UNKNOWN = "?"


@dataclass(frozen=True, slots=True)
class OutboxIdentity:
    """A server and an id space on it. `server`: system identifier and timeline; None if this user may not read them.

    Its text form, used in frames and reports: `<system identifier>/<timeline>/<table>/<sequence>/<file>`.
    """

    server: tuple[int, int] | None
    space: IdSpace

    def __str__(self) -> str:
        server = self.server or (_UNKNOWN, _UNKNOWN)
        return "/".join(map(str, (*server, self.space.table, self.space.sequence, self.space.file)))

    @staticmethod
    def parse(text: str) -> OutboxIdentity:
        """Parse the result of `str`."""
        system, timeline, *space = text.split("/")
        server = None if system == _UNKNOWN else (int(system), int(timeline))
        return OutboxIdentity(server, IdSpace(*map(int, space)))

    def why_not(self, meant: OutboxIdentity) -> str | None:
        """Why this differs from `meant`; None if it does not."""
        if self.server is not None and meant.server is not None and self.server != meant.server:
            return f"it is server {_name(self.server)}, the term was taken on {_name(meant.server)}"
        if self.space.table != meant.space.table:
            return f"the outbox is a different table from before (oid {self.space.table}, not {meant.space.table})"
        if self.space != meant.space:
            return "the ids of the outbox have started again"
        return None


def read_place(connection: Connection, table: OutboxTable, sequence: str) -> OutboxIdentity:
    """The place of this session; `sequence` is SQL for the oid of the outbox's sequence, NULL if it has none."""
    row = connection.execute(read_space(table, sequence)).fetchone()
    oids = row if row is not None else (None, None, None)
    return OutboxIdentity(server_identity(connection), IdSpace(*(number or 0 for number in oids)))


def sequence_oid(name: str | None) -> str:
    """SQL for the oid of the sequence with this qualified and quoted name."""
    return "NULL::oid" if name is None else oid_of(name)


def read_holder(connection: Connection, table: OutboxTable) -> tuple[int, str | None]:
    """(term, holder) of the term row; raises SchemaError if there is none."""
    row = connection.execute(f"SELECT term, holder::text FROM {table.term}").fetchone()
    if row is None:
        raise SchemaError(f"{table.term} has no row", hint="run `harvester init`")
    return int(row[0]), row[1]


def why_another(place: OutboxIdentity, term: int, meant: OutboxIdentity | None, meant_term: int) -> str | None:
    """Why this place, with this term row, is not the one on which the term was taken (P9); None if it is."""
    reason = place.why_not(meant) if meant is not None else None
    if reason is None and term < meant_term:
        return f"its term is {term}, ours is {meant_term}: it has gone back in time"
    return reason


def read_session(connection: Connection) -> tuple[int, str]:
    """(pid, backend_start) of this session, as shown in pg_stat_activity."""
    row = connection.execute(
        "SELECT pid, backend_start::text FROM pg_catalog.pg_stat_activity WHERE pid = pg_backend_pid()"
    ).fetchone()
    if row is None:
        raise SchemaError("pg_stat_activity does not show this session")
    return int(row[0]), str(row[1])


def _name(server: tuple[int, int]) -> str:
    return f"{server[0]}/{server[1]}"
