"""The statements of leases, as text (pure); `outbox.leases` explains what they decide.

A stash is one statement: a *step* of the lease's row, and the INSERT of what the step has accepted. A refusal is a
result, not an SQL error, so it leaves the caller's transaction intact. The step exists in two forms.

The *deciding* step is an UPDATE that always finds the lease, whatever the outcome (protocol P26). Under READ COMMITTED,
an UPDATE that has waited for another transaction computes its new values from the row as that transaction left it; a
condition on what is to change would be evaluated on the snapshot first, so a step with the next number would not wait
for the transaction that brings the previous one. `previous` receives the old sequence, which RETURNING could not return
otherwise; the INSERT uses it to decide which rows are new.

The *hopeful* step is for the usual case, the very next number: compare and set, on the row where the stasher last saw
it. Each update leaves an old version of the row behind, and all those of a transaction stay while it runs (and all of
any transaction while someone holds an old snapshot); finding the row by its id means walking past them. If the hopeful
step finds nothing, that says nothing about the lease, nothing has happened, and the deciding step follows.

statement_timestamp() is the server's clock, read once when the statement arrives: all conditions of a statement see the
same moment (clock_timestamp() would differ between two of them), and a long transaction does not stop it, as it does
now().
"""

from __future__ import annotations

from harvester.outbox.shape import ColumnShape
from harvester.outbox.sql import columns
from harvester.outbox.sql.insert import written_columns
from harvester.outbox.tables import OutboxTable, doubled

ONE = ("topic", "key", "value", "header_keys", "header_values", "part")
MANY = ("topics", "keys", "values", "header_keys", "header_values", "parts")

# A server may lose the last commits of a session that does not wait for them, and then give out a generation twice.
WAIT_FOR_COMMIT = (
    "SELECT set_config('synchronous_commit', 'on', true)"
    " WHERE current_setting('synchronous_commit') IN ('off', 'local', 'remote_write')"
)

# Even if the session's default differs: a lease is one statement on rows that it locks.
READ_COMMITTED = "SET TRANSACTION ISOLATION LEVEL READ COMMITTED"


def take(table: OutboxTable) -> str:
    """Parameters: names (text[]), seconds. Rows (name, id, generation, sequence, upstream_position, expires_at).

    One row per name, in no order; locks are taken in the order of names, to avoid deadlocks. A name keeps everything
    saved under it, whether or not its last lease has expired (P44).
    """
    return f"""INSERT INTO {doubled(table.lease)} AS l (name, leased_at, expires_at)
SELECT name, statement_timestamp(), statement_timestamp() + make_interval(secs => %(seconds)s::float8)
FROM unnest(%(names)s::text[]) AS name ORDER BY name COLLATE "C"
ON CONFLICT (name) DO UPDATE SET
    generation = l.generation + 1, leased_at = excluded.leased_at, expires_at = excluded.expires_at
RETURNING name, id, generation, sequence, upstream_position, expires_at"""


def sweep(table: OutboxTable) -> str:
    """Remove expired leases under which nothing was saved, and set the others aside; parameter rows: the maximum.

    Leases set aside get the end -infinity, so that no sweep visits them again, and stay until their name is leased.
    Waits for nothing: a lease that a transaction has locked is swept another time.
    """
    lease, over = doubled(table.lease), "expires_at <= statement_timestamp() AND expires_at > '-infinity'"
    empty = "sequence = 0 AND upstream_position IS NULL"
    return f"""WITH ended AS MATERIALIZED (
    SELECT id FROM {lease} WHERE {over} ORDER BY expires_at LIMIT %(rows)s::integer FOR UPDATE SKIP LOCKED
), removed AS (
    DELETE FROM {lease} WHERE id IN (SELECT id FROM ended) AND {over} AND {empty}
) UPDATE {lease} SET expires_at = '-infinity' WHERE id IN (SELECT id FROM ended) AND {over} AND NOT ({empty})"""


def stash_one(table: OutboxTable, shape: ColumnShape, *, hopeful: bool) -> str:
    """Parameters: lease, generation, first, last, position, those named in ONE; if `hopeful`, at: the row's ctid.

    One row (ctid, id of the new row or NULL, sequence before, generation after, expired), none if there is no such
    lease. A hopeful step returns the first two, none if it found nothing.
    """
    given = (f"%(key)s::{shape.key_type}", f"%(value)b::{shape.value_type}")
    fields = columns.stored(shape, *given, "%(header_keys)s::text[]", "%(header_values)s::text[]")
    values = f"now(), %(topic)s, {fields}{', %(part)s::integer' if shape.has_partition else ''}"
    step = _hope(table) if hopeful else _decide(table)
    return f"""WITH {step}, inserted AS (
    INSERT INTO {doubled(table.sql)} ({written_columns(shape)}) SELECT {values} FROM step WHERE accepted RETURNING id
) SELECT place, (SELECT id FROM inserted){"" if hopeful else _FOUND} FROM step"""


def stash_many(table: OutboxTable, shape: ColumnShape, *, hopeful: bool) -> str:
    """The same for arrays, named in MANY; returns an array of the new rows' ids, in no order."""
    fields, part = "topic, key, value, header_keys, header_values", ""
    selected = f"now(), topic, {columns.stored(shape, 'key', 'value', 'header_keys::text[]', 'header_values::text[]')}"
    if shape.has_partition:
        fields, selected, part = f"{fields}, part", f"{selected}, part", ", %(parts)b::integer[]"
    new = "accepted" if hopeful else "accepted AND %(first)s::bigint + n - 1 > previous"
    step = _hope(table) if hopeful else _decide(table)
    return f"""WITH {step}, inserted AS (
    INSERT INTO {doubled(table.sql)} ({written_columns(shape)})
    SELECT {selected} FROM step, unnest(%(topics)b::text[], %(keys)b::{shape.key_type}[],
        %(values)b::{shape.value_type}[], %(header_keys)b::text[], %(header_values)b::text[]{part})
        WITH ORDINALITY AS r({fields}, n)
    WHERE {new} ORDER BY n RETURNING id
) SELECT place, ARRAY(SELECT id FROM inserted){"" if hopeful else _FOUND} FROM step"""


_FOUND = ", previous, generation, expired"


# In the second half of its time; an unchanged value costs nothing, not even in the index.
_DUE = "statement_timestamp() > leased_at + (expires_at - leased_at) / 2"


def _renewed(condition: str) -> str:
    """Using a lease extends it by its full duration (P44)."""
    again = "make_interval(secs => extract(epoch FROM expires_at - leased_at)::float8)"
    return f"""leased_at = CASE WHEN {condition} THEN statement_timestamp() ELSE leased_at END,
        expires_at = CASE WHEN {condition} THEN statement_timestamp() + {again} ELSE expires_at END"""


def _hope(table: OutboxTable) -> str:
    return f"""step AS (
    UPDATE {doubled(table.lease)} SET
        sequence = %(last)s::bigint,
        upstream_position = coalesce(%(position)s::text, upstream_position),
        {_renewed(_DUE)}
    WHERE ctid = %(at)s::tid AND id = %(lease)s::bigint AND generation = %(generation)s::bigint
        AND sequence = %(first)s::bigint - 1 AND expires_at > statement_timestamp()
    RETURNING ctid AS place, true AS accepted
)"""


def _decide(table: OutboxTable) -> str:
    """The cases of SET and the condition in RETURNING are the table of `outbox.leases` in SQL.

    In RETURNING, `previous` is the old sequence, and the generation is ours if it was ours or became so.
    """
    ours, live = "%(generation)s::bigint", "expires_at > statement_timestamp()"
    low, high = "%(first)s::bigint - 1", "%(last)s::bigint - 1"
    holds = f"{live} AND generation IN ({ours}, {ours} - 1)"
    return f"""step AS (
    UPDATE {doubled(table.lease)} SET
        previous = sequence,
        sequence = CASE WHEN {holds} AND sequence BETWEEN {low} AND {high} THEN %(last)s::bigint ELSE sequence END,
        generation = CASE WHEN {holds} AND sequence >= {low} THEN {ours} ELSE generation END,
        upstream_position = CASE WHEN {holds} AND sequence BETWEEN {low} AND {high}
            THEN coalesce(%(position)s::text, upstream_position) ELSE upstream_position END,
        {_renewed(f"{holds} AND sequence >= {low} AND {_DUE}")}
    WHERE id = %(lease)s::bigint
    RETURNING ctid AS place, previous, generation, NOT ({live}) AS expired,
        {live} AND generation = {ours} AND previous BETWEEN {low} AND {high} AS accepted
)"""
