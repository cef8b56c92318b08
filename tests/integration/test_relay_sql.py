"""The statements that read and remove rows, on a real server: what they return, in which order, under which term."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from harvester.delivery.decode import decode
from harvester.outbox.leader_session import MarkSession
from harvester.outbox.libpq import copy_rows
from harvester.outbox.schema import inspect
from harvester.outbox.sql import queries, settle
from harvester.outbox.sql.queries import Row
from harvester.outbox.tables import OutboxTable
from harvester.relay.core.scan import LOWEST

pytestmark = pytest.mark.servers

OUTBOX = OutboxTable.parse("outbox")
KEYS = [
    "",
    "a",
    "key-7",
    "K\u00e4se",
    "\U0001f9c0",
    "it's",
    'back\\slash "quoted"',
    "' OR 1=1 --",
    "{NULL}",
    "NULL",
    "%s",
]
BINARY_KEYS = [b"", b"a", b"\0\xff'\\", bytes(range(256))]


@pytest.fixture(params=["text", "bytea"])
def connection(request: pytest.FixtureRequest, database: str) -> Iterator[psycopg.Connection[Any]]:
    """The default outbox, and one whose keys are bytea."""
    with psycopg.connect(database, autocommit=True) as opened:
        if request.param == "bytea":
            for table in ("outbox", "outbox_quarantine"):
                opened.execute(f"ALTER TABLE {table} ALTER kafka_key TYPE bytea USING NULL")
        opened.execute("ALTER TABLE outbox ALTER kafka_key DROP NOT NULL")
        yield opened


def keys_of(connection: psycopg.Connection[Any]) -> list[str | bytes | None]:
    is_text = inspect(connection, OUTBOX).key_type == "text"
    return [None, *(KEYS if is_text else BINARY_KEYS)]


def as_bytes(key: str | bytes | None) -> bytes | None:
    return key.encode() if isinstance(key, str) else key


def fill(connection: psycopg.Connection[Any], keys: list[str | bytes | None]) -> dict[int, bytes | None]:
    """One row for each key; returns the key's bytes by id."""
    found = {}
    for key in keys:
        row = connection.execute(
            "INSERT INTO outbox (create_time, kafka_topic, kafka_key, kafka_header_keys, kafka_header_values)"
            " VALUES (now(), 't', %s, '{}', '{}') RETURNING id",
            (key,),
        ).fetchone()
        assert row is not None
        found[row[0]] = as_bytes(key)
    return found


@dataclass(frozen=True)
class Leader:
    """Who marks, and in which way."""

    term: int
    holder: UUID
    leader_id: UUID
    writes: bool

    @property
    def fence(self) -> dict[str, Any]:
        return {"fence": queries.Fence(self.term, self.holder)}


@pytest.fixture(params=["memory", "table"])
def marking(request: pytest.FixtureRequest) -> str:
    """Both ways of marking."""
    return str(request.param)


def lead(connection: psycopg.Connection[Any], marking: str = "memory", term: int = 1) -> Leader:
    holder = uuid4()
    connection.execute("UPDATE outbox_term SET term = %s, holder = %s", (term, holder))
    return Leader(term, holder, uuid4(), marking == "table")


def mark(
    connection: psycopg.Connection[Any],
    leader: Leader,
    limit: int = 100,
    high: int | None = None,
    gaps: Sequence[tuple[int, int]] = (),
    kept: Sequence[int] = (),
) -> list[Row]:
    shape = inspect(connection, OUTBOX)
    where: dict[str, Any] = {"limit": limit, "high": high, "gaps": gaps}
    if leader.writes:
        given = {**leader.fence, **where, "leader_id": leader.leader_id, "kept": kept}
        return copy_rows(connection, queries.mark_in_table(OUTBOX, shape, **given), 10)
    return copy_rows(connection, queries.mark_in_memory(OUTBOX, shape, **leader.fence, **where), 10)


def ids_of(rows: Sequence[Row]) -> list[int]:
    return [row[0] for row in rows]


def carried(connection: psycopg.Connection[Any], leader: Leader) -> list[int]:
    """Ids of the rows that carry this leader id."""
    found = connection.execute("SELECT id FROM outbox WHERE leader_id = %s ORDER BY id", (leader.leader_id,))
    return [row[0] for row in found]


def put(connection: psycopg.Connection[Any], *ids: int) -> None:
    """Rows with these ids."""
    connection.execute(
        "INSERT INTO outbox (id, create_time, kafka_topic, kafka_header_keys, kafka_header_values)"
        " SELECT id, now(), 't', '{}', '{}' FROM unnest(%s::bigint[]) AS id",
        (list(ids),),
    )


def test_a_mark_gives_rows_by_id_and_key(connection: psycopg.Connection[Any], marking: str) -> None:
    keys = fill(connection, keys_of(connection))
    rows = mark(connection, lead(connection, marking))
    assert [(record_id, key) for record_id, key, _ in rows] == sorted(keys.items())
    records = decode(b"".join(raw for _, _, raw in rows))
    assert [(record.id, record.key) for record in records] == sorted(keys.items())


def test_a_scan_goes_on_above_what_it_has_read(connection: psycopg.Connection[Any], marking: str) -> None:
    put(connection, 1, 2, 5, 9)
    leader = lead(connection, marking)
    assert ids_of(mark(connection, leader, limit=2)) == [1, 2]
    assert carried(connection, leader) == ([1, 2] if leader.writes else [])
    assert ids_of(mark(connection, leader, high=2)) == [5, 9]
    assert mark(connection, leader, high=9) == []
    assert ids_of(mark(connection, replace(leader, leader_id=uuid4()))) == [1, 2, 5, 9]


def test_rows_that_appear_in_gaps_come_before_those_above(connection: psycopg.Connection[Any], marking: str) -> None:
    put(connection, 3, 10, 12)
    leader = lead(connection, marking)
    assert ids_of(mark(connection, leader)) == [3, 10, 12]
    put(connection, 1, 2, 4, 9, 11, 13, 14)
    gaps = [(0, 2), (4, 9), (11, 11)]
    where: dict[str, Any] = {"high": 12, "gaps": gaps}
    fresh = leader if not leader.writes else replace(leader, leader_id=uuid4())
    assert ids_of(mark(connection, fresh, limit=2, **where)) == [1, 2]
    where["gaps"] = [(0, 0), (4, 9), (11, 11)]
    assert ids_of(mark(connection, fresh, limit=3, **where)) == [4, 9, 11]
    assert ids_of(mark(connection, fresh, limit=3, high=12, gaps=[(5, 8)])) == [13, 14]
    assert mark(connection, fresh, high=14, gaps=[(5, 8)]) == []
    assert 3 not in carried(connection, fresh)  # above and between, never what was read before


def test_gaps_without_rows_leave_the_whole_limit_to_the_rows_above(
    connection: psycopg.Connection[Any], marking: str
) -> None:
    put(connection, 5, *range(100, 110))
    leader = lead(connection, marking)
    assert ids_of(mark(connection, leader, limit=5, high=5, gaps=[(-(2**63), 4), (6, 99)])) == list(range(100, 105))


def test_a_mark_in_the_table_takes_what_the_leader_id_does_not_carry(connection: psycopg.Connection[Any]) -> None:
    put(connection, 1, 2, 3, 4)
    leader = lead(connection, "table")
    assert ids_of(mark(connection, leader, limit=2)) == [1, 2]
    assert ids_of(mark(connection, leader)) == [3, 4]
    assert mark(connection, leader) == []
    successor = replace(leader, leader_id=uuid4())
    assert ids_of(mark(connection, successor, kept=[2, 3])) == [1, 4]
    assert carried(connection, leader) == [2, 3]  # on the wire since before: neither taken nor rewritten
    assert ids_of(mark(connection, successor, high=1, gaps=[(0, 4)])) == [2, 3]


def test_a_mark_in_memory_writes_nothing(connection: psycopg.Connection[Any]) -> None:
    put(connection, 1, 2)
    versions = "SELECT array_agg(ROW(xmin, xmax, ctid)::text ORDER BY id) FROM outbox"
    before = connection.execute(versions).fetchone()
    leader = lead(connection)
    with connection.transaction():
        locks = "SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND mode ~ 'Row(Share|Exclusive)Lock'"
        assert ids_of(mark(connection, leader)) == [1, 2]
        assert ids_of(mark(connection, leader, high=1, gaps=[(0, 0)])) == [2]
        assert connection.execute(locks).fetchone() == (0,)
    assert connection.execute(versions).fetchone() == before


def test_another_term_marks_and_fetches_nothing(connection: psycopg.Connection[Any], marking: str) -> None:
    put(connection, 1, 2, 4)
    leader = lead(connection, marking, term=5)
    shape = inspect(connection, OUTBOX)
    for other in (replace(leader, term=4), replace(leader, term=6), replace(leader, holder=uuid4())):
        assert mark(connection, other) == []
        assert mark(connection, other, high=2, gaps=[(0, 1)]) == []
        assert copy_rows(connection, queries.fetch(OUTBOX, shape, **other.fence, ids=[1, 2]), 10) == []
        assert carried(connection, other) == []
    assert ids_of(mark(connection, leader)) == [1, 2, 4]


def test_a_fetch_reads_rows_by_id_and_leaves_them_alone(connection: psycopg.Connection[Any]) -> None:
    put(connection, 1, 2, 4)
    leader, shape = lead(connection, "table"), inspect(connection, OUTBOX)
    marked = mark(connection, leader, limit=2)
    rows = copy_rows(connection, queries.fetch(OUTBOX, shape, **leader.fence, ids=[4, 3, 1]), 10)
    assert ids_of(rows) == [1, 4]
    assert rows[0] == marked[0]
    assert carried(connection, leader) == [1, 2]
    assert copy_rows(connection, queries.fetch(OUTBOX, shape, **leader.fence, ids=[]), 10) == []


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(LOWEST, 4, [-7, 1, 2, 4]), (2, 4, [2, 4]), (5, 2**63 - 1, [5]), (LOWEST, LOWEST, []), (3, 3, [])],
)
def test_a_look_names_every_id_between_its_bounds(
    connection: psycopg.Connection[Any], low: int, high: int, expected: list[int]
) -> None:
    put(connection, -7, 1, 2, 4, 5)
    found = connection.execute(queries.ids_between(OUTBOX, low, high)).fetchall()
    assert sorted(row[0] for row in found) == expected


def test_a_look_that_takes_too_long_costs_neither_session_nor_limit(
    connection: psycopg.Connection[Any], database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(connection, 1, 2, 5)
    session = MarkSession(database, OUTBOX, "test", 7)
    session.open()
    try:
        began = session.session
        monkeypatch.setattr(queries, "ids_between", lambda *_: "SELECT 1 FROM pg_sleep(5)")
        assert session.ids_between(LOWEST, 4) is None
        monkeypatch.undo()
        assert session.ids_between(LOWEST, 4) == [1, 2]
        assert session.session == began
        assert session.is_open
        assert session._open().execute("SHOW statement_timeout").fetchone() == ("7s",)
    finally:
        session.close()


def test_a_purge_around_locks_names_what_it_left(connection: psycopg.Connection[Any], database: str) -> None:
    put(connection, 1, 2, 3, 4, 5)
    with psycopg.connect(database) as other:
        other.execute("SELECT FROM outbox WHERE id IN (2, 5) FOR KEY SHARE")
        left = connection.execute(settle.purge_unlocked(OUTBOX), {"ids": [1, 2, 3, 9]}).fetchall()
        assert left == [(2,)]
        assert connection.execute("SELECT array_agg(id ORDER BY id) FROM outbox").fetchone() == ([2, 4, 5],)
        other.rollback()
    assert connection.execute(settle.purge_unlocked(OUTBOX), {"ids": [2]}).fetchall() == []
    assert connection.execute("SELECT array_agg(id ORDER BY id) FROM outbox").fetchone() == ([4, 5],)
