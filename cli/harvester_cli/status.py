"""`harvester status`: the outbox according to the database, whether or not a harvester is running."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from harvester_cli.options import JsonOption, LoggedOptions, grouped
from harvester_cli.output import connected, grid, print_json, print_rich

if TYPE_CHECKING:
    from rich.table import Table

    from harvester.outbox.overview import Overview
    from harvester.outbox.tables import OutboxTable


@grouped
def status(options: LoggedOptions, json_: JsonOption = False) -> None:
    """Show who leads, what waits in the outbox and what is in quarantine, from the database alone."""
    settings = options.load()

    from harvester.outbox.overview import read_overview

    with connected(settings, "status") as connection:
        overview = read_overview(connection, settings.table)
    if json_:
        print_json(as_json(settings.table, overview))
    else:
        print_rich(as_table(settings.table, overview, datetime.now(UTC), settings.leader_group_id))


def as_json(table: OutboxTable, overview: Overview) -> dict[str, Any]:
    """The keys are a public interface; times are ISO 8601 with offset, ages are in seconds."""

    def text(value: object) -> str | None:
        return None if value is None else str(value)

    shape, backlog, quarantine = overview.shape, overview.backlog, overview.quarantine
    return {
        "outbox": str(table),
        "schema_version": overview.schema_version,
        "outbox_id": str(overview.outbox_id),
        "incarnation": str(overview.incarnation),
        "delivery": overview.delivery,
        "term": overview.term,
        "holder": text(overview.holder),
        "holder_name": overview.holder_name,
        "acquired_at": overview.acquired_at.isoformat() if overview.acquired_at else None,
        "leader_group": overview.owner.group,
        "kafka_cluster": overview.owner.cluster,
        "backlog": {
            "records": backlog.records,
            "capped": backlog.capped,
            "oldest_age_s": backlog.oldest_age_s,
            "advice": backlog.advice,
        },
        "quarantine": {
            "records": quarantine.records,
            "capped": quarantine.capped,
            "newest_at": quarantine.newest_at.isoformat() if quarantine.newest_at else None,
            "newest_error": quarantine.newest_error,
        },
        "shape": {
            "id": shape.id_type,
            "key": shape.key_stored or shape.key_type,
            "key_nullable": shape.key_nullable,
            "value": shape.value_stored or shape.value_type,
            "headers": shape.headers,
            "leader_id": shape.leader_id_type,
            "partition": shape.has_partition,
            "notify": shape.has_notify,
        },
    }


def as_table(table: OutboxTable, overview: Overview, now: Any, group: str) -> Table:
    """Two columns, name and value, for people. `group`: the configured one, which may differ."""
    shape, backlog, quarantine = overview.shape, overview.backlog, overview.quarantine
    leader = "none yet"
    if overview.holder is not None:
        leader = f"{overview.holder_name or overview.holder}, the last to take over"
        if overview.acquired_at is not None:
            leader += f", {_age((now - overview.acquired_at).total_seconds())} ago"
    belongs_to = str(overview.owner)
    if overview.owner.group not in (None, group):
        belongs_to += f"; the configuration has {group!r}, whose harvesters are refused"
    waiting = _count(backlog.records, capped=backlog.capped)
    if backlog.oldest_age_s is not None:
        waiting += f", the first for {_age(backlog.oldest_age_s)}"
    given_up = _count(quarantine.records, capped=quarantine.capped)
    if quarantine.newest_error:
        given_up += f", the latest: {' '.join(quarantine.newest_error.split())}"
    key, value = shape.key_stored or shape.key_type, shape.value_stored or shape.value_type
    columns = (
        f"id {shape.id_type}, key {key}{' or null' if shape.key_nullable else ''}, value {value},"
        f" leader_id {shape.leader_id_type}, {'a' if shape.has_partition else 'no'} partition"
    )
    rows = (
        ("term", str(overview.term)),
        ("leader", leader),
        ("belongs to", belongs_to),
        ("backlog", waiting),
        *((("advice", backlog.advice),) if backlog.advice is not None else ()),
        ("quarantine", given_up),
        ("delivery", overview.delivery),
        ("columns", columns),
        ("notify", "a trigger wakes the leader" if shape.has_notify else "polling only"),
        ("schema", f"version {overview.schema_version}"),
        ("outbox id", f"{overview.outbox_id}, incarnation {overview.incarnation}"),
    )
    return grid(rows, f"outbox {table}")


def _count(records: int, *, capped: bool) -> str:
    noun = "record" if records == 1 and not capped else "records"
    return f"{'more than ' if capped else ''}{records:,} {noun}"


def _age(seconds: float) -> str:
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{max(seconds, 0):.1f} s"
