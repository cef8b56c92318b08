"""The place of a session: the server, the term, the id space of the outbox, and the backend (P7, P9, P35)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psycopg

from harvester.errors import SchemaError
from harvester.outbox.connect import server_identity
from harvester.outbox.queries import IdSpace, read_space
from harvester.outbox.tables import OutboxTable

Connection = psycopg.Connection[Any]

_UNKNOWN = "?"


@dataclass(frozen=True, slots=True)
class Place:
    """A server and an id space on it. `server`: system identifier and timeline; None where this user may not ask.

    Its text travels in frames and reports: `<system identifier>/<timeline>/<table>/<sequence>/<file>`.
    """

    server: tuple[int, int] | None
    space: IdSpace

    def __str__(self) -> str:
        server = self.server or (_UNKNOWN, _UNKNOWN)
        return "/".join(map(str, (*server, self.space.table, self.space.sequence, self.space.file)))

    @staticmethod
    def parse(text: str) -> Place:
        """Reads what `str` made."""
        system, timeline, *space = text.split("/")
        server = None if system == _UNKNOWN else (int(system), int(timeline))
        return Place(server, IdSpace(*map(int, space)))

    def why_not(self, meant: Place) -> str | None:
        """The reason why this is not the place that was meant; None: it is."""
        if self.server is not None and meant.server is not None and self.server != meant.server:
            return f"it is server {_name(self.server)}, the term was taken on {_name(meant.server)}"
        if self.space.table != meant.space.table:
            return f"the outbox is another table than before (oid {self.space.table}, not {meant.space.table})"
        if self.space != meant.space:
            return "the ids of the outbox have started again"
        return None


def read_place(connection: Connection, table: OutboxTable, sequence: str) -> Place:
    """The place of this session; `sequence` is SQL for the oid of the outbox's sequence, NULL where it has none."""
    row = connection.execute(read_space(table, sequence)).fetchone()
    oids = row if row is not None else (None, None, None)
    return Place(server_identity(connection), IdSpace(*(number or 0 for number in oids)))


def sequence_oid(name: str | None) -> str:
    """SQL for the oid of the sequence of this name, qualified and quoted."""
    if name is None:
        return "NULL::oid"
    quoted = name.replace("'", "''")
    return f"pg_catalog.to_regclass('{quoted}')::oid"


def read_holder(connection: Connection, table: OutboxTable) -> tuple[int, str | None]:
    """(term, holder) of the term row; raises SchemaError when there is none."""
    row = connection.execute(f"SELECT term, holder::text FROM {table.term}").fetchone()
    if row is None:
        raise SchemaError(f"{table.term} has no row", hint="run `harvester init`")
    return int(row[0]), row[1]


def why_another(place: Place, term: int, meant: Place | None, meant_term: int) -> str | None:
    """The reason why this place with this term row is not the one that the term was taken on (P9); None: it is."""
    reason = place.why_not(meant) if meant is not None else None
    if reason is None and term < meant_term:
        return f"its term is {term}, ours is {meant_term}: it has gone back in time"
    return reason


def read_session(connection: Connection) -> tuple[int, str]:
    """(pid, backend_start) of this session, as others find it in pg_stat_activity."""
    row = connection.execute(
        "SELECT pid, backend_start::text FROM pg_catalog.pg_stat_activity WHERE pid = pg_backend_pid()"
    ).fetchone()
    if row is None:
        raise SchemaError("pg_stat_activity does not show this session")
    return int(row[0]), str(row[1])


def _name(server: tuple[int, int]) -> str:
    return f"{server[0]}/{server[1]}"
