"""Least privilege as SQL, for roles that relay, only write, only call the functions, or only monitor.

The script is for the owner of the tables. In one transaction, it revokes what the role was granted on them before and
grants what is listed here: it may be run again, and a role keeps no privilege that is no longer listed.

The relay changes nothing that writers wrote: in the outbox it updates only `leader_id`. A writer reads no record and
chooses neither `id` nor `leader_id`: an id that does not come from the column's default can be older than its
transaction, which would break the order (protocol P10).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from harvester.errors import ConfigurationError, Problem
from harvester.outbox.catalog import Facts, Relation
from harvester.outbox.sql.stash_function import signatures
from harvester.outbox.tables import OutboxTable, literal, quoted

_NOT_FOR_WRITERS = frozenset({"id", "leader_id"})
_ARRAYS = ("kafka_header_keys", "kafka_header_values")
_NEW = ("create_time", "kafka_topic", "kafka_key", "kafka_value", *_ARRAYS, "kafka_partition")


def notice_columns(columns: Collection[str]) -> list[str]:
    """Those of an outbox's columns that a notice fills; `kafka_headers` is another's column next to the two arrays."""
    headers = _ARRAYS if _ARRAYS[0] in columns else ("kafka_headers",)
    return [name for name in ("create_time", "kafka_topic", "kafka_key", "kafka_value", *headers) if name in columns]


@dataclass(frozen=True, slots=True)
class GrantTarget:
    """The names in the statements: `schema` is a bare name, `sequence` quoted for SQL text, `columns` those of writers.

    `archive`: purges write to it; `notices`: a quarantine also inserts a notice. `functions`: those for callers, with
    their types, whether or not they exist.
    """

    table: OutboxTable
    schema: str
    sequence: str
    columns: tuple[str, ...]
    functions: tuple[str, ...]
    archive: bool
    notices: bool

    @classmethod
    def of(
        cls, table: OutboxTable, facts: Facts | None, *, archive: bool = False, notices: bool = False
    ) -> GrantTarget:
        """According to the catalog; without facts, or while there is no outbox, as `init` will create it."""
        outbox = facts.outbox if facts is not None else None
        schema = outbox.schema if outbox is not None else table.schema or "public"
        known = facts.sequence if facts is not None else None
        columns = outbox.columns if outbox is not None else _NEW
        placed = OutboxTable(schema, table.name)
        return cls(
            table=placed,
            schema=schema,
            sequence=known.name if known is not None else OutboxTable(schema, f"{table.name}_id_seq").sql,
            columns=tuple(name for name in columns if name not in _NOT_FOR_WRITERS),
            functions=tuple(signatures(placed, *_kinds(outbox))),
            archive=archive,
            notices=notices,
        )


def relay_grants(place: GrantTarget, role: str) -> list[str]:
    """Marking, purging, quarantine, the term row, the sequence's last value; nothing else unless configured."""
    table, to = place.table, quoted(role)
    grants = [
        f"GRANT USAGE ON SCHEMA {quoted(place.schema)} TO {to}",
        # Locking a row requires UPDATE on any one column.
        f"GRANT SELECT, UPDATE (leader_id), DELETE ON {table.sql} TO {to}",
        f"GRANT SELECT, UPDATE ON {table.term} TO {to}",
        f"GRANT SELECT, INSERT ON {table.quarantine} TO {to}",
        f"GRANT SELECT ON SEQUENCE {place.sequence} TO {to}",
    ]
    if place.archive:
        grants.append(f"GRANT INSERT ON {table.archive} TO {to}")
    if place.notices:
        written = (*notice_columns(place.columns), "kafka_partition")
        columns = ", ".join(quoted(name) for name in written if name in place.columns)
        grants += [
            f"GRANT INSERT ({columns}) ON {table.sql} TO {to}",
            f"GRANT USAGE ON SEQUENCE {place.sequence} TO {to}",
        ]
    return grants


def writer_grants(place: GrantTarget, role: str) -> list[str]:
    """Inserting rows, and leases. In the outbox a writer sees only the ids, which its own INSERT returns."""
    to = quoted(role)
    columns = ", ".join(quoted(column) for column in place.columns)
    return [
        f"GRANT USAGE ON SCHEMA {quoted(place.schema)} TO {to}",
        f"GRANT SELECT (id), INSERT ({columns}) ON {place.table.sql} TO {to}",
        f"GRANT USAGE ON SEQUENCE {place.sequence} TO {to}",
        # Whoever takes a lease removes expired ones. The sequence of its id belongs to an identity column and needs no
        # grant.
        f"GRANT SELECT, INSERT, UPDATE, DELETE ON {place.table.lease} TO {to}",
    ]


def caller_grants(place: GrantTarget, role: str) -> list[str]:
    """Calling the functions, without privileges on any table."""
    return [
        f"GRANT USAGE ON SCHEMA {quoted(place.schema)} TO {quoted(role)}",
        f"GRANT EXECUTE ON FUNCTION {', '.join(place.functions)} TO {quoted(role)}",
    ]


def monitor_grants(place: GrantTarget, role: str) -> list[str]:
    """Reading what `harvester status` and `dead list` show; nothing can be changed or locked."""
    table, to = place.table, quoted(role)
    return [
        f"GRANT USAGE ON SCHEMA {quoted(place.schema)} TO {to}",
        f"GRANT SELECT ON {table.sql}, {table.term}, {table.quarantine} TO {to}",
    ]


def revocations(place: GrantTarget, role: str) -> list[str]:
    """Revoke what the role was granted, including columns; refuses the owner, who would lose the tables."""
    table, of = place.table, quoted(role)
    tables = [table.sql, table.term, table.quarantine, table.lease, *([table.archive] if place.archive else [])]
    owned = (
        f"BEGIN IF EXISTS (SELECT FROM pg_catalog.pg_class WHERE oid = {literal(table.sql)}::pg_catalog.regclass"
        f" AND pg_catalog.pg_get_userbyid(relowner) = {literal(role)}) THEN"
        f" RAISE EXCEPTION 'role % owns the outbox: give the harvester and the writers other roles',"
        f" {literal(role)}; END IF; END"
    )
    functions = "BEGIN {} END".format(
        " ".join(
            f"IF pg_catalog.to_regprocedure({literal(name)}) IS NOT NULL THEN REVOKE ALL ON FUNCTION {name} FROM {of};"
            " END IF;"
            for name in place.functions
        )
    )
    return [
        f"DO {literal(owned)}",
        f"DO {literal(functions)}",
        f"REVOKE ALL ON {', '.join(tables)} FROM {of}",
        f"REVOKE ALL ON SEQUENCE {place.sequence} FROM {of}",
    ]


def script(
    place: GrantTarget,
    *,
    relays: Sequence[str] = (),
    writers: Sequence[str] = (),
    callers: Sequence[str] = (),
    monitors: Sequence[str] = (),
) -> str:
    """For psql, one transaction. A role may have several purposes. Raises ConfigurationError for an invalid role."""
    roles = list(dict.fromkeys([*relays, *writers, *callers, *monitors]))
    for role in roles:
        # To PostgreSQL, "public", quoted or not, means everyone.
        if role == "public" or not role or "\x00" in role:
            raise ConfigurationError([Problem("role", f"{role!r} is not a role's name", "the role of one program")])
    statements = ["BEGIN"]
    for role in roles:
        statements += revocations(place, role)
    kinds = ((relay_grants, relays), (writer_grants, writers), (caller_grants, callers), (monitor_grants, monitors))
    for grants, named in kinds:
        for role in dict.fromkeys(named):
            statements += grants(place, role)
    return "".join(f"{statement};\n" for statement in [*statements, "COMMIT"])


def _kinds(outbox: Relation | None) -> tuple[str, str]:
    """The types of key and value for the functions; those of a new table while there is none."""
    columns = outbox.columns if outbox is not None else {}
    binary = {name for name, column in columns.items() if column.type == "bytea"}
    return "bytea" if "kafka_key" in binary else "text", "bytea" if "kafka_value" in binary else "text"
