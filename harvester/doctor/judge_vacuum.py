"""Whether deleted rows of the outbox go away: autovacuum's settings, and what holds it back (pure).

A relay deletes every row that it is given. Whoever reads the table from its head, as a new leader does, reads past
all that are deleted and not yet removed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from harvester.config import Config
from harvester.doctor.facts import Database, Holder, Vacuum
from harvester.doctor.findings import Finding, age, listed, ok, skipped, warning

LONG_S = 300.0
_MANY_DEAD = 100_000
_BEHIND = 10  # times the rows at which autovacuum would begin
_WITHOUT_S = 600.0
_OFF = ("off", "false", "no", "0")


def judge_vacuum(database: Database, config: Config) -> list[Finding]:
    """Settings, dead rows, and holders of old snapshots."""
    found = []
    if database.vacuum is not None:
        found += [
            *_settings(database.settings, database.vacuum, config),
            _dead_rows(database.settings, database.vacuum),
        ]
    if database.holders is not None:
        found += _holders(database.holders)
    if not database.sees_all:
        found.append(
            skipped(
                "vacuum.sessions",
                "this role does not see what sessions of other roles do, so old snapshots may go unnoticed",
                f"run doctor as an administrator, or GRANT pg_read_all_stats TO {database.catalog.user}",
            )
        )
    return found


def _settings(settings: Mapping[str, str], vacuum: Vacuum, config: Config) -> list[Finding]:
    found = []
    for name in ("autovacuum", "track_counts"):
        if settings.get(name) in _OFF:
            advice = f"set {name} = on: without it deleted rows stay for ever"
            found.append(warning("vacuum.autovacuum", f"{name} is off on this server", advice))
    if vacuum.options.get("autovacuum_enabled", "on").lower() in _OFF:
        advice = f"ALTER TABLE {config.table} RESET (autovacuum_enabled)"
        found.append(warning("vacuum.autovacuum", f"autovacuum is switched off for {config.table}", advice))
    if not found:
        begins = _begins(settings, vacuum)
        found.append(ok("vacuum.autovacuum", f"autovacuum is on; it begins at {begins:,.0f} dead rows"))
    return found


def _dead_rows(settings: Mapping[str, str], vacuum: Vacuum) -> Finding:
    text = f"{vacuum.dead:,} dead rows"
    since = "never vacuumed" if vacuum.idle_s is None else f"last vacuumed {age(max(vacuum.idle_s, 0))} ago"
    behind = vacuum.dead > max(_BEHIND * _begins(settings, vacuum), _MANY_DEAD)
    if behind and (vacuum.idle_s is None or vacuum.idle_s > _WITHOUT_S):
        advice = "see what holds vacuum back (below), or run VACUUM; with much traffic lower autovacuum_naptime"
        return warning("vacuum.dead_rows", f"{text}, {since}", advice)
    return ok("vacuum.dead_rows", f"{text}, {since}")


def _begins(settings: Mapping[str, str], vacuum: Vacuum) -> float:
    def value(name: str) -> float:
        return float(vacuum.options.get(name) or settings.get(name) or 0)

    return value("autovacuum_vacuum_threshold") + value("autovacuum_vacuum_scale_factor") * vacuum.live


def _holders(holders: Sequence[Holder]) -> list[Finding]:
    def old(kind: str) -> list[str]:
        # One without an age is held for as long as it exists.
        return [
            f"{holder.name}{f', {age(holder.age_s)}' if holder.age_s is not None else ''}"
            for holder in holders
            if holder.kind == kind and (holder.age_s is None or holder.age_s > LONG_S)
        ]

    found = []
    for kind, what, advice in (
        (
            "transaction",
            "transactions with an old snapshot keep deleted rows",
            "end them (pg_terminate_backend), and set idle_in_transaction_session_timeout for those who forget",
        ),
        (
            "writer",
            "transactions that have written to the outbox are still open: the leader keeps looking for their ids",
            "commit or end them; records of them are published after their commit only",
        ),
        (
            "prepared",
            "prepared transactions keep deleted rows, and their own records back",
            "COMMIT PREPARED or ROLLBACK PREPARED them; pg_prepared_xacts has who prepared them",
        ),
        (
            "slot",
            "replication slots that nobody uses keep deleted rows",
            "bring the standby back, or pg_drop_replication_slot",
        ),
    ):
        names = old(kind)
        if names:
            found.append(warning(f"vacuum.{kind}", f"{what}: {listed(names)}", advice))
    return found or [ok("vacuum.holders", f"nothing has held deleted rows back for more than {age(LONG_S)}")]
