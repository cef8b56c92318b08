"""The SQL of the relay: marks, fetches, the term. Text only; nothing here talks to a server.

Rule P6: under READ COMMITTED, a condition on a snapshot fences nothing: a mark that waited for a row lock took rows
after the term had risen. So writing marks and quarantine begin with a MATERIALIZED CTE that selects the term row FOR
SHARE (term and holder must match); a take-over that has raised the term makes it empty, one that is about to raise it
waits for the statement. Locks are taken first on the term row, then on ids in ascending order. A mark in memory and a
fetch change nothing and lock nothing: a plain read of the term in the same statement suffices. A purge is not fenced:
the acknowledgement was real, whoever received it (P2).

Ids identify rows only within their *id space* (P35): the table with the outbox's name, and the file of its sequence,
which a restart of the sequence replaces. Statements that act on ids check it against the space in which these were
read. `setval` leaves no such trace, so every row is read with its xmin, to which its purge is bound (P50).

Everything variable is a literal built in this module from ints, UUIDs and escaped keys: COPY takes no parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from uuid import UUID

from harvester.outbox.shape import OutboxShape
from harvester.outbox.sql import columns
from harvester.outbox.tables import OutboxTable, doubled

# The result of statements that read rows: the id, the key, and the row as the server sent it (empty: cut off).
Row = tuple[int, bytes | None, bytes]

_NEAR_IDS = 1_000
_FEW_GAPS = 20
# By the database's clock. An expired lease is as good as none.
_LENT = "(holder IS NOT NULL AND lease_until > clock_timestamp())"
_WANTED = "(wanted_until > clock_timestamp())"
# Moved from a group that did not release its term, and not led since.
_MOVED = "(holder IS NOT NULL AND holder_kind = 'moved')"
_OURS = "(leader_group = %(group)s) IS NOT FALSE AND (kafka_cluster = %(cluster)s) IS NOT FALSE"
_NO_PARTITION = "'-9223372036854775808'::bigint"


@dataclass(frozen=True, slots=True)
class IdSpace:
    """Identifies the source of ids: the oids of the table and its sequence, and the sequence's file; 0 if unknown."""

    table: int
    sequence: int = 0
    file: int = 0


@dataclass(frozen=True, slots=True)
class Fence:
    """The term, holder and id space under which a statement may take effect.

    `watched`: transaction ids; nothing is read if one of them has ended for the snapshot (P38).
    """

    term: int
    holder: UUID
    space: IdSpace | None = None
    watched: tuple[int, ...] = ()


def in_space(table: OutboxTable, space: IdSpace | None) -> str:
    """A condition: the ids of this outbox are still those of `space`; begins with AND, empty for None.

    It is evaluated after the statement has locked the table: a statement that has waited for a TRUNCATE, or for a
    renaming of tables, looks up name and file after that.
    """
    if space is None:
        return ""
    condition = f" AND {oid_of(table.sql)} = {space.table:d}::oid"
    if space.sequence:
        condition += f" AND pg_catalog.pg_relation_filenode({space.sequence:d}::oid)::bigint = {space.file:d}"
    return condition


def read_space(table: OutboxTable, sequence: str) -> str:
    """The current id space: oid of the table, then oid and file of its sequence; NULL for what does not exist.

    `sequence`: SQL for the sequence's oid; NULL if there is none.
    """
    return (
        f"SELECT {oid_of(table.sql)}, s.oid, pg_catalog.pg_relation_filenode(s.oid)::bigint"
        f" FROM (SELECT {sequence} AS oid) AS s"
    )


def oid_of(relation: str) -> str:
    """SQL for the oid of a table or sequence, given its quoted name; NULL if there is none."""
    name = relation.replace("'", "''")
    return f"pg_catalog.to_regclass('{name}')::oid"


# The WAL position after the snapshot of a reading statement was taken: a setting of the session. Commits that the
# snapshot shows precede it; what the statement itself writes, by pruning pages, follows it.
WAL_POSITION = "harvester.wal_position"
_NOTE_WAL_POSITION = f"pg_catalog.set_config('{WAL_POSITION}', pg_catalog.pg_current_wal_insert_lsn()::text, false)"


def _fence(table: OutboxTable, fence: Fence, lock: str = " FOR SHARE", selected: str = "1") -> str:
    conditions = f"term = {fence.term:d} AND holder = '{fence.holder}'{in_space(table, fence.space)}"
    if fence.watched:
        conditions += f" AND NOT EXISTS ({_transactions_over(fence.watched)})"
    return f"WITH t AS MATERIALIZED (SELECT {selected} FROM {table.term} WHERE {conditions}{lock})"


def file_of(sequence: str) -> str:
    """SQL for the file of a sequence, which changes with a restart."""
    name = sequence.replace("'", "''")
    return f"pg_catalog.pg_relation_filenode('{name}'::pg_catalog.regclass)::bigint"


def check_term(table: OutboxTable, watched: Iterable[int]) -> str:
    """Why a mark may have returned nothing: term and holder, and the watched transactions that have ended."""
    return f"SELECT term, holder, ARRAY({_transactions_over(watched)}) FROM {table.term}"


def _transactions_over(watched: Iterable[int]) -> str:
    """The given transactions that have ended for the statement's own snapshot."""
    numbers = ",".join(f"{number:d}" for number in watched)
    return (
        f"SELECT w.id::text::bigint FROM unnest('{{{numbers}}}'::xid8[]) AS w(id)"
        " WHERE pg_catalog.pg_visible_in_snapshot(w.id, pg_catalog.pg_current_snapshot())"
    )


@lru_cache(maxsize=8)
def _columns(shape: OutboxShape) -> str:
    """The columns that `harvester.delivery.decode` expects; xmin, id, time and partition are never NULL.

    If the statement has changed the row, its xmin is the statement's own transaction (P50).
    """
    partition = f"coalesce(o.kafka_partition::bigint, {_NO_PARTITION})" if shape.has_partition else _NO_PARTITION
    return (
        f"o.xmin, o.id::bigint, {columns.key(shape, 'o')}, coalesce(o.create_time, 'epoch'), {partition},"
        f" o.kafka_topic, {columns.header_keys(shape, 'o')}, {columns.header_values(shape, 'o')},"
        f" {columns.value(shape, 'o')}"
    )


def _above(high: int | None, gaps: Sequence[tuple[int, int]] = ()) -> str:
    """The condition for rows above `high`, and in these gaps, which must be close to it."""
    if high is None:
        return ""
    if not gaps:
        return f" AND o.id > {high:d}"
    ranges = "".join(f" OR o.id BETWEEN {low:d} AND {up:d}" for low, up in gaps)
    return f" AND o.id >= {gaps[0][0]:d} AND (o.id > {high:d}{ranges})"


def _are_near(high: int | None, gaps: Sequence[tuple[int, int]]) -> bool:
    """Whether reading on from the first gap, past rows read before, costs less than looking into each gap."""
    return not gaps or (high is not None and high - gaps[0][0] <= _NEAR_IDS and len(gaps) <= _FEW_GAPS)


def _scan_ids(table: OutboxTable, high: int | None, gaps: Sequence[tuple[int, int]], limit: int, condition: str) -> str:
    """CTEs `g` and `n`: the first ids of the rows in the (existing) gaps, then those above `high`."""
    low, up = (_id_array(edge) for edge in zip(*gaps, strict=True))
    return (
        f", g AS MATERIALIZED (SELECT x.id FROM unnest({low}, {up}) AS r(low, up)"
        f" CROSS JOIN LATERAL (SELECT o.id FROM {table.sql} o"
        f" WHERE o.id BETWEEN r.low AND r.up{condition} ORDER BY o.id LIMIT {limit:d}) x"
        f" WHERE EXISTS (SELECT 1 FROM t) ORDER BY x.id LIMIT {limit:d}),"
        f" n AS MATERIALIZED (SELECT o.id FROM {table.sql} o"
        f" WHERE EXISTS (SELECT 1 FROM t){_above(high)}{condition}"
        f" ORDER BY o.id LIMIT {limit:d} - (SELECT count(*) FROM g))"
    )


_BOTH = "o.id = ANY (ARRAY(SELECT id FROM g UNION ALL SELECT id FROM n))"


def mark_in_memory(
    table: OutboxTable,
    shape: OutboxShape,
    *,
    fence: Fence,
    limit: int,
    high: int | None,
    gaps: Sequence[tuple[int, int]],
) -> str:
    """Read the next rows; the leader remembers that it has them. Records the WAL position (WAL_POSITION)."""
    fenced = _fence(table, fence, "", _NOTE_WAL_POSITION)
    if _are_near(high, gaps):
        wanted = _above(high, gaps)
        return (
            f"COPY ({fenced} SELECT {_columns(shape)} FROM {table.sql} o WHERE EXISTS (SELECT 1 FROM t){wanted}"
            f" ORDER BY o.id LIMIT {limit:d}) TO STDOUT (FORMAT BINARY)"
        )
    return (
        f"COPY ({fenced}{_scan_ids(table, high, gaps, limit, '')}"
        f" SELECT {_columns(shape)} FROM {table.sql} o WHERE {_BOTH}) TO STDOUT (FORMAT BINARY)"
    )


def mark_in_table(
    table: OutboxTable,
    shape: OutboxShape,
    *,
    fence: Fence,
    leader_id: UUID,
    limit: int,
    high: int | None,
    gaps: Sequence[tuple[int, int]],
    kept: Iterable[int] = (),
) -> str:
    """Take the next rows that this leader id has not taken; they carry it from then on."""
    ids = _id_array(kept)
    condition = f" AND o.leader_id IS DISTINCT FROM '{leader_id}'"
    if ids != _id_array(()):
        condition += f" AND o.id <> ALL ({ids})"
    if _are_near(high, gaps):
        cte, chosen = "", f"EXISTS (SELECT 1 FROM t){_above(high, gaps)}{condition}"
        order = f"ORDER BY o.id LIMIT {limit:d}"
    else:
        cte, chosen = _scan_ids(table, high, gaps, limit, condition), f"{_BOTH}{condition}"
        order = "ORDER BY o.id"
    return (
        f"COPY ({_fence(table, fence)}{cte}, m AS MATERIALIZED ("
        f"SELECT o.id FROM {table.sql} o WHERE {chosen} {order} FOR UPDATE OF o)"
        f" UPDATE {table.sql} o SET leader_id = '{leader_id}' WHERE o.id = ANY (ARRAY(SELECT id FROM m))"
        f" RETURNING {_columns(shape)}) TO STDOUT (FORMAT BINARY)"
    )


def fetch(table: OutboxTable, shape: OutboxShape, *, fence: Fence, ids: Iterable[int]) -> str:
    """Read deferred rows. Records the WAL position (WAL_POSITION)."""
    return (
        f"COPY ({_fence(table, fence, '', _NOTE_WAL_POSITION)} SELECT {_columns(shape)} FROM {table.sql} o"
        f" WHERE EXISTS (SELECT 1 FROM t) AND o.id = ANY ({_id_array(ids)})) TO STDOUT (FORMAT BINARY)"
    )


def read_rows(table: OutboxTable, shape: OutboxShape, ids: Iterable[int], space: IdSpace | None) -> str:
    """Read rows like marks do, whoever has the term."""
    return (
        f"COPY (SELECT {_columns(shape)} FROM {table.sql} o WHERE o.id = ANY ({_id_array(ids)})"
        f"{in_space(table, space)}) TO STDOUT (FORMAT BINARY)"
    )


def behind_others(table: OutboxTable, shape: OutboxShape) -> str:
    """The rows of %(ids)s whose key has an older row that is not among them. For psycopg."""
    outbox, key = doubled(table.sql), columns.key(shape, "o")
    return (
        f"WITH n AS MATERIALIZED (SELECT o.id, {key} AS key FROM {outbox} o"
        f" WHERE o.id = ANY (%(ids)s::bigint[]) AND {key} IS NOT NULL),"
        f" x AS (SELECT {key} AS key, min(o.id) AS id FROM {outbox} o LEFT JOIN n ON n.id = o.id"
        f" WHERE n.id IS NULL AND o.id < (SELECT max(id) FROM n) AND {key} IN (SELECT n.key FROM n) GROUP BY 1)"
        " SELECT n.id FROM n JOIN x ON x.key = n.key WHERE x.id < n.id"
    )


def ids_between(table: OutboxTable, low: int, high: int) -> str:
    """Every id from `low` to `high`, both included."""
    return f"SELECT o.id FROM {table.sql} o WHERE o.id BETWEEN '{low:d}'::bigint AND '{high:d}'::bigint"


def holders(table: OutboxTable, oid: int, sequence: str | None) -> str:
    """Who holds a RowExclusiveLock on the outbox (including prepared transactions), the last id given out, the file of
    its sequence, which changes with a restart but not with a call (P10), who asks for the term (P32), and which table
    has the outbox's name now.

    The sequence is read first, and the locks depend on it so that no planner reverses this: a session that takes an id
    that counts as given out must be seen holding its lock. A sequence that was never called has yet to return its
    last_value.

    Each holder comes with its transaction id, as 32 bits: the oldest that it holds, since subtransactions have their
    own. A holder without a transaction id counts only while it executes a statement: between statements it has written
    nothing, and fetched no id for a future row. The last column is the next transaction id, as 64 bits.
    """
    value = "SELECT NULL::bigint AS id, NULL::bigint AS file"
    if sequence:
        value = f"SELECT last_value - (NOT is_called)::int AS id, {file_of(sequence)} AS file FROM {sequence}"
    return (
        f"WITH given AS MATERIALIZED ({value}) SELECT (SELECT jsonb_object_agg(h.name, h.number) FROM"
        " (SELECT l.virtualtransaction AS name, max(l.pid) AS pid, bool_or(l.locktype = 'relation') AS holds,"
        " (array_agg(l.transactionid::text::bigint ORDER BY age(l.transactionid) DESC)"
        " FILTER (WHERE l.locktype = 'transactionid'))[1] AS number FROM pg_catalog.pg_locks l"
        " WHERE l.granted AND (l.locktype = 'transactionid' AND l.mode = 'ExclusiveLock'"
        f" OR l.locktype = 'relation' AND l.relation = {oid:d} AND l.mode = 'RowExclusiveLock'"
        " AND l.database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = current_database()))"
        " AND coalesce(given.id, 0) IS NOT NULL GROUP BY 1) h WHERE h.holds AND (h.number IS NOT NULL OR NOT EXISTS"
        " (SELECT 1 FROM pg_catalog.pg_stat_get_activity(h.pid) a"
        " WHERE a.pid = h.pid AND a.state LIKE 'idle in transaction%' AND a.backend_xid IS NULL))),"
        f" given.id, given.file, (SELECT wanted_by FROM {table.term} WHERE {_WANTED}),"
        " pg_catalog.pg_snapshot_xmax(pg_catalog.pg_current_snapshot())::text::bigint,"
        f" {oid_of(table.sql)} FROM given"
    )


def read_bookmark(table: OutboxTable, sequence: str) -> str:
    """Where a scan may begin (P38): up to which id, and the open ranges below it, as alternating low and high.

    No row: there is no bookmark, or it belongs to another id space, or names ids yet to be given out.
    """
    return (
        f"SELECT t.closed_floor, t.open_ids FROM {table.term} t, {sequence} s"
        f" WHERE t.closed_floor <= s.last_value - (NOT s.is_called)::int AND t.floor_space = {_id_space(sequence)}"
    )


def save_bookmark(table: OutboxTable, sequence: str) -> str:
    """Save the bookmark; no row if the term belongs to another. Parameters high, open, term, holder."""
    return (
        f"UPDATE {doubled(table.term)} t SET closed_floor = %(high)s, open_ids = %(open)s::bigint[],"
        f" floor_space = {doubled(_id_space(sequence))} WHERE term = %(term)s AND holder = %(holder)s RETURNING true"
    )


def _id_space(sequence: str) -> str:
    """The incarnation alone does not reveal a sequence that was restarted and has caught up while nobody looked."""
    return f"t.incarnation || '/' || t.outbox_oid || '/' || {file_of(sequence)}"


def read_term(table: OutboxTable) -> str:
    """Term, holder, the outbox's identity, the term's delivery mode, who has borrowed it or asks to (P32), the holder's
    name, and the owner of the outbox (P37).
    """
    return (
        "SELECT term, holder, outbox_id, incarnation, delivery, progress_topic, holder_kind,"
        f" CASE WHEN {_LENT} THEN holder_name WHEN {_WANTED} THEN wanted_by END,"
        f" holder_name, leader_group, kafka_cluster FROM {table.term}"
    )


def take_term(table: OutboxTable) -> str:
    """Compare and set (P8); returns the term.

    Parameters expected (term), seen (the highest term), holder, name, sessions, went_back: ids may have started again,
    and the new term no longer shows it, so the incarnation is renewed with it (P9). The previous term's delivery mode
    stays in the row until what it left behind is settled: `note_delivery`. A lent term cannot be taken. The outbox
    becomes owned by the parameters group and cluster (NULL: unknown), unless it belongs to others (P37).
    """
    return (
        f"UPDATE {doubled(table.term)} SET term = greatest(term, %(seen)s) + 1, holder = %(holder)s,"
        " holder_name = %(name)s, sessions = %(sessions)s, acquired_at = clock_timestamp(),"
        f" holder_kind = CASE WHEN {_MOVED} THEN 'moved' ELSE 'harvester' END, lease_until = NULL,"
        " incarnation = CASE WHEN %(went_back)s::boolean THEN gen_random_uuid() ELSE incarnation END,"
        " leader_group = coalesce(leader_group, %(group)s), kafka_cluster = coalesce(kafka_cluster, %(cluster)s)"
        f" WHERE term = %(expected)s AND {_LENT} IS NOT TRUE AND {_OURS} RETURNING term"
    )


def move(table: OutboxTable) -> str:
    """Give the outbox to the group and cluster of the parameters (P37); no row: its state is not the one that was read.

    Parameters term, holder: as read. The first leader then waits for what the old leader may have on the wire:
    `holder_kind` indicates that the old term was not released. No progress topic: the old group's is not the new one's.
    """
    return (
        f"UPDATE {doubled(table.term)} SET leader_group = %(group)s, kafka_cluster = %(cluster)s,"
        " delivery = 'at-least-once', progress_topic = NULL,"
        " holder_kind = CASE WHEN holder IS NULL THEN 'harvester' ELSE 'moved' END"
        " WHERE term = %(term)s AND holder IS NOT DISTINCT FROM %(holder)s::uuid"
        f" AND {_LENT} IS NOT TRUE RETURNING true"
    )


def want_term(table: OutboxTable) -> str:
    """Ask the leader to give up the term, and others not to take it (P32). No row: another process is already asking.

    Parameters name, patience_s: how long the request is valid.
    """
    return (
        f"UPDATE {doubled(table.term)} SET wanted_by = %(name)s,"
        " wanted_until = clock_timestamp() + make_interval(secs => %(patience_s)s)"
        f" WHERE {_WANTED} IS NOT TRUE OR wanted_by = %(name)s RETURNING true"
    )


def borrow_term(table: OutboxTable) -> str:
    """Borrow the term, for a bulk drain (P32), otherwise like `take_term`; returns the term and the end of the lease.

    `holder_kind` stays that of the predecessor until what this one left behind is settled (`note_delivery`).
    Parameters as for `take_term`, and lease_s.
    """
    return (
        f"UPDATE {doubled(table.term)} SET term = greatest(term, %(seen)s) + 1, holder = %(holder)s,"
        " holder_name = %(name)s, sessions = %(sessions)s, acquired_at = clock_timestamp(),"
        " lease_until = clock_timestamp() + make_interval(secs => %(lease_s)s), wanted_by = NULL, wanted_until = NULL"
        f" WHERE term = %(expected)s AND {_LENT} IS NOT TRUE AND ({_WANTED} IS NOT TRUE OR wanted_by = %(name)s)"
        f" AND {_OURS} RETURNING term, lease_until"
    )


def renew_loan(table: OutboxTable) -> str:
    """Extend the lease, unless the term belongs to another; returns its end; parameters lease_s, term, holder."""
    return (
        f"UPDATE {doubled(table.term)} SET lease_until = clock_timestamp() + make_interval(secs => %(lease_s)s)"
        " WHERE term = %(term)s AND holder = %(holder)s RETURNING lease_until"
    )


def note_delivery(table: OutboxTable) -> str:
    """Set the term's delivery mode and holder_kind; parameters delivery, kind, progress_topic (NULL: unchanged), term,
    holder.
    """
    return (
        f"UPDATE {doubled(table.term)} SET delivery = %(delivery)s,"
        " progress_topic = coalesce(%(progress_topic)s, progress_topic),"
        " holder_kind = %(kind)s"
        " WHERE term = %(term)s AND holder = %(holder)s"
    )


def end_loan(table: OutboxTable) -> str:
    """A successor need not wait for the lease, but learns that the term was not released; parameters term, holder."""
    return f"UPDATE {doubled(table.term)} SET lease_until = NULL WHERE term = %(term)s AND holder = %(holder)s"


def forget_wish(table: OutboxTable) -> str:
    """Withdraw the request for the term; parameter name."""
    return f"UPDATE {doubled(table.term)} SET wanted_by = NULL, wanted_until = NULL WHERE wanted_by = %(name)s"


def release(table: OutboxTable) -> str:
    """Release the term; parameters term, holder."""
    return (
        f"UPDATE {doubled(table.term)} SET holder = NULL, lease_until = NULL"
        " WHERE term = %(term)s AND holder = %(holder)s"
    )


def register(table: OutboxTable) -> str:
    """Record the sessions of a leader (P7); parameters sessions, term, holder."""
    return f"UPDATE {doubled(table.term)} SET sessions = %(sessions)s WHERE term = %(term)s AND holder = %(holder)s"


def end_sessions(table: OutboxTable) -> str:
    """End the sessions in the row of term %(expected)s, except %(own)s (P7): a frozen backend keeps its locks.

    Those of a role whose sessions ours may not end are left alone: if one of them has a lock, that will show.
    """
    return (
        f"SELECT count(pg_catalog.pg_terminate_backend(a.pid)) FROM {doubled(table.term)} t,"
        " jsonb_to_recordset(t.sessions) AS s(pid int, started timestamptz)"
        " JOIN pg_catalog.pg_stat_activity a ON a.pid = s.pid AND a.backend_start = s.started"
        " WHERE t.term = %(expected)s AND a.pid <> pg_backend_pid() AND a.pid <> ALL (%(own)s::int[])"
        " AND (pg_has_role(a.usesysid, 'USAGE') OR pg_has_role('pg_signal_backend', 'USAGE')"
        " AND NOT (SELECT rolsuper FROM pg_catalog.pg_roles r WHERE r.oid = a.usesysid))"
    )


def note_server(table: OutboxTable) -> str:
    """Record which server this is, and renew the incarnation if it was a different one (P9).

    Parameters identifier and timeline (NULL: unknown, nothing changes). Returns one row, whether it was renewed.
    """
    return (
        "WITH v AS MATERIALIZED (SELECT coalesce((system_identifier, timeline) <>"
        f" (%(identifier)s::bigint, %(timeline)s::int), false) AS renewed FROM {doubled(table.term)} FOR UPDATE)"
        f" UPDATE {doubled(table.term)}"
        " SET incarnation = CASE WHEN v.renewed THEN gen_random_uuid() ELSE incarnation END,"
        " system_identifier = coalesce(%(identifier)s::bigint, system_identifier),"
        " timeline = coalesce(%(timeline)s::int, timeline) FROM v RETURNING v.renewed"
    )


def _id_array(ids: Iterable[int]) -> str:
    return "'{" + ",".join(f"{i:d}" for i in ids) + "}'::bigint[]"
