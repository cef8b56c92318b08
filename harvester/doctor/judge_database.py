"""Judges PostgreSQL: its settings, the tables, and whether deleted rows go away (pure).

Whether deleted rows of the outbox go away: autovacuum's settings, and what holds it back. A relay deletes every row
that it is given. Whoever reads the table from its head, as a new leader does, reads past all that are deleted and not
yet removed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from harvester.config import Config
from harvester.doctor.facts import (
    CheckResult,
    Connections,
    DatabaseFacts,
    Holder,
    Kafka,
    Pooling,
    Vacuum,
    age,
    listed,
    ok,
    problem,
    skipped,
    warning,
)
from harvester.errors import SchemaError
from harvester.outbox.leader_session import Owner
from harvester.outbox.shape import INIT_HINT, MINIMUM_SERVER_VERSION, OutboxShape, check_companions, outbox_shape
from harvester.outbox.sql import ddl

LONG_S = 300.0
_MANY_DEAD = 100_000
_BEHIND = 10  # times the rows at which autovacuum would begin
_WITHOUT_S = 600.0
_OFF = ("off", "false", "no", "0")


def judge_vacuum(database: DatabaseFacts, config: Config) -> list[CheckResult]:
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


def _settings(settings: Mapping[str, str], vacuum: Vacuum, config: Config) -> list[CheckResult]:
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


def _dead_rows(settings: Mapping[str, str], vacuum: Vacuum) -> CheckResult:
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


def _holders(holders: Sequence[Holder]) -> list[CheckResult]:
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


TESTED_VERSION = 150000
_SESSIONS = 2  # the mark loop's, and one that looks at the backlog while somebody looks at the status


def judge_database(database: DatabaseFacts, config: Config) -> list[CheckResult]:
    """All but what concerns vacuum and the clock."""
    return [
        _version(database),
        _pooling(database),
        *_durability(database, config),
        *_schema(database, config),
        *_beside(database, config),
        *_indexes(database, config),
        *_connections(database, config),
        *_identity(database),
        *(skipped(f"database.{part.replace(' ', '_')}", f"could not be read: {why}", "run doctor as a role that may")
          for part, why in database.unread.items()),
    ]  # fmt: skip


def judge_owner(database: DatabaseFacts, kafka: Kafka | None, config: Config) -> list[CheckResult]:
    """Whether the outbox is that of this leader group and Kafka cluster (P37)."""
    theirs, ours = database.owner, Owner(config.leader_group_id, kafka.cluster if kafka is not None else None)
    if database.schema_version is None:
        return []
    if theirs.excludes(ours):
        advice = "set the right leader_group_id and cluster; or stop those harvesters and run `harvester move`"
        return [problem("outbox.group", f"the outbox belongs to {theirs}, the configuration is of {ours}", advice)]
    text = f"the outbox belongs to {theirs}" if theirs.group is not None else "no leader group has led here yet"
    return [ok("outbox.group", text)]


def sessions_needed(config: Config) -> int:
    """Sessions of one harvester: one for each shard, the leader's, one for figures, one for the archive."""
    return config.limits.shards + _SESSIONS + (config.archive != "off")


def _version(database: DatabaseFacts) -> CheckResult:
    text = f"PostgreSQL {database.settings.get('server_version') or database.version / 10000}"
    if database.version < MINIMUM_SERVER_VERSION:
        least = MINIMUM_SERVER_VERSION // 10000
        return problem("database.version", f"{text} is too old", f"PostgreSQL {least} or newer is needed")
    if database.version < TESTED_VERSION:
        least = TESTED_VERSION // 10000
        return warning("database.version", f"{text} is not among those that are tested", f"take {least} or newer")
    return ok("database.version", text)


def _pooling(database: DatabaseFacts) -> CheckResult:
    check = "database.pooler"
    if database.pooling is Pooling.TRANSACTION:
        return problem(
            check,
            "two sessions were served by one backend: a pooler in transaction (or statement) mode stands in between",
            "point data_source at PostgreSQL itself, or at a pool in session mode: the harvester keeps settings,"
            " prepared statements and LISTEN in its sessions, and ends those of a leader before it by their pid."
            " Applications that write may stay behind the pooler",
        )
    if database.pooling is Pooling.SESSION:
        return warning(
            check,
            "a pooler stands in between; it keeps a backend for each session",
            "make sure that it stays in session mode, and give the harvester a direct address if there is one",
        )
    return ok(check, "sessions go to the server itself")


def _durability(database: DatabaseFacts, config: Config) -> list[CheckResult]:
    settings, found = database.settings, []
    for name in ("fsync", "full_page_writes"):
        if settings.get(name) == "off":
            found.append(
                problem(
                    "database.durability",
                    f"{name} is off: a crash of the machine can lose or damage what was committed",
                    f"set {name} = on, unless the data may be lost",
                )
            )
    commit = settings.get("synchronous_commit", "on")
    if commit in ("off", "local"):
        lost = "a crash" if commit == "off" else "a failover"
        found.append(
            warning(
                "database.synchronous_commit",
                f"synchronous_commit is {commit} by default: {lost} can lose transactions that writers were told of,"
                " together with their records. The harvester's own sessions use on",
                "set it to on for the roles that write, if their commits have to stay",
            )
        )
    if not found:
        found.append(ok("database.durability", f"fsync is on, synchronous_commit is {commit}"))
    if config.delivery == "exactly-once" and database.standbys and not settings.get("synchronous_standby_names"):
        found.append(
            warning(
                "database.failover",
                f"{database.standbys} standbys follow asynchronously: a failover that loses commits repeats records,"
                " even exactly-once",
                "set synchronous_standby_names (docs/guarantees.md, of the database)",
            )
        )
    return found


def _schema(database: DatabaseFacts, config: Config) -> list[CheckResult]:
    table = config.table
    try:
        shape = outbox_shape(table, database.catalog)
    except SchemaError as error:
        return [problem("outbox.table", error.message, error.hint or INIT_HINT)]
    found = [_sequence(database, shape)]
    try:
        check_companions(table, database.catalog, shape)
    except SchemaError as error:
        return [*found, problem("outbox.tables", error.message, error.hint or INIT_HINT)]
    found.append(ok("outbox.tables", f"{table} and the tables beside it fit, and this role may relay"))
    found.append(_schema_version(database, config))
    return found


def _sequence(database: DatabaseFacts, shape: OutboxShape) -> CheckResult:
    sequence = database.catalog.sequence
    assert sequence is not None  # outbox_shape refuses a table without
    return ok("outbox.ids", f"{shape.id_type} ids from {sequence.name}, CACHE {sequence.cache}, no CYCLE")


def _schema_version(database: DatabaseFacts, config: Config) -> CheckResult:
    known, found = ddl.schema_version(), database.schema_version
    if found is None:
        return problem("outbox.version", f"{config.table.term} has no row", INIT_HINT)
    if found < known:
        return problem("outbox.version", f"the schema has version {found}, this harvester needs {known}", INIT_HINT)
    if found > known:
        advice = "use a newer harvester: the database was migrated by one"
        return problem("outbox.version", f"the schema has version {found}, this harvester knows {known}", advice)
    return ok("outbox.version", f"schema version {found}")


def _beside(database: DatabaseFacts, config: Config) -> list[CheckResult]:
    if database.catalog.outbox is None or "beside" in database.unread:
        return []
    found, table = [], config.table
    if not database.lease and database.catalog.term is not None:
        advice = f"{INIT_HINT}; only stashers with a lease need it"
        found.append(warning("outbox.leases", f"{table.lease} is missing", advice))
    if database.archive == "missing":
        found.append(
            problem("outbox.archive", f"archive is {config.archive}, but {table.archive} is missing", INIT_HINT)
        )
    elif database.archive == "denied":
        grant = f"let the owner run: GRANT INSERT ON {table.archive} TO {database.catalog.user}"
        found.append(problem("outbox.archive", f"this role may not insert into {table.archive}", grant))
    elif database.archive is not None:
        found.append(ok("outbox.archive", f"{table.archive} is there"))
    if database.notices is False:
        advice = "`harvester grants` prints what the role needs; quarantine waits until it has it"
        found.append(problem("outbox.notices", f"this role may not insert notices into {table}", advice))
    return found


def _indexes(database: DatabaseFacts, config: Config) -> list[CheckResult]:
    found = []
    invalid = [index.name for index in database.indexes if not index.valid]
    if invalid:
        advice = f"REINDEX INDEX CONCURRENTLY, or drop: {listed(invalid)} costs each write and serves nobody"
        found.append(warning("outbox.indexes", f"indexes that are not valid: {listed(invalid)}", advice))
    on_leader = [index.name for index in database.indexes if "leader_id" in index.columns]
    if on_leader and config.marking == "table":
        advice = "drop it: the harvester reads by id, and each mark has to write the index as well"
        found.append(warning("outbox.indexes", f"indexes with leader_id: {listed(on_leader)}", advice))
    if not found and database.indexes:
        found.append(ok("outbox.indexes", listed([index.name for index in database.indexes])))
    return found


def _connections(database: DatabaseFacts, config: Config) -> list[CheckResult]:
    facts = database.connections
    if facts is None:
        return []
    needed = sessions_needed(config)
    free, limit = _free(facts)
    text = f"{free} more sessions are free ({limit}), a harvester needs {needed}"
    if free >= needed:
        return [ok("database.connections", text)]
    # Those of a harvester that runs already are among the used ones.
    advice = f"unless a harvester of this outbox runs already: raise {limit}, or lower limits.shards"
    return [warning("database.connections", text, advice)]


def _free(facts: Connections) -> tuple[int, str]:
    """How many sessions this role may still open, and what bounds them. Our own two are counted as used."""
    bounds = [(facts.most - facts.reserved - facts.used, "max_connections")]
    if facts.role_limit >= 0:
        bounds.append((facts.role_limit - facts.role_used, "the role's CONNECTION LIMIT"))
    if facts.database_limit >= 0:
        bounds.append((facts.database_limit - facts.database_used, "the database's CONNECTION LIMIT"))
    free, name = min(bounds)
    return max(free, 0), name


def _identity(database: DatabaseFacts) -> list[CheckResult]:
    if database.identity_known:
        return []
    return [
        warning(
            "database.identity",
            "this role may not ask which server it is, so a failover is noticed only by a term that went back",
            f"GRANT EXECUTE ON FUNCTION pg_catalog.pg_control_system() TO {database.catalog.user}",
        )
    ]
