"""Judges PostgreSQL: its settings, the tables, and whether deleted rows are removed (pure).

A relay deletes every row that it is given. Reading the table from its head, as a new leader does, means reading past
all rows that are deleted but not removed yet; hence the checks of autovacuum's settings and of what holds it back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

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
from harvester.outbox.overview import BACKLOG_ROWS
from harvester.outbox.shape import INIT_HINT, MINIMUM_SERVER_VERSION, check_companions, outbox_shape
from harvester.outbox.sql import ddl

LONG_S = 300.0
TESTED_VERSION = 150000
_MANY_DEAD = 100_000
_BEHIND = 10  # times the number of rows at which autovacuum begins
_WITHOUT_S = 600.0
_OFF = ("off", "false", "no", "0")
_SESSIONS = 2  # the mark loop's, and one that reads the backlog while someone watches the status
# What keeps deleted rows, by kind of holder: the effect, and the remedy.
_HOLDERS = {
    "transaction": (
        "transactions with an old snapshot keep deleted rows",
        "end them (pg_terminate_backend), and set idle_in_transaction_session_timeout to end abandoned ones",
    ),
    "writer": (
        "transactions that have written to the outbox are still open: the leader keeps looking for their ids",
        "commit or end them; their records are published only after the commit",
    ),
    "prepared": (
        "prepared transactions keep deleted rows, and hold back their own records",
        "COMMIT PREPARED or ROLLBACK PREPARED them; pg_prepared_xacts shows who prepared them",
    ),
    "slot": (
        "unused replication slots keep deleted rows",
        "bring the standby back, or drop the slot with pg_drop_replication_slot",
    ),
}


def judge_database(database: DatabaseFacts, config: Config) -> Iterator[CheckResult]:
    """Everything except vacuum and the clock."""
    yield _version(database)
    yield _pooling(database)
    yield from _durability(database, config)
    yield from _schema(database, config)
    yield from _beside(database, config)
    yield from _indexes(database, config)
    yield from _connections(database, config)
    yield from _keys(database, config)
    if not database.identity_known:
        yield warning(
            "database.identity",
            "this role may not identify the server, so a failover is noticed only if the term goes back",
            f"GRANT EXECUTE ON FUNCTION pg_catalog.pg_control_system() TO {database.catalog.user}",
        )
    for part, why in database.unread.items():
        yield skipped(
            f"database.{part.replace(' ', '_')}", f"could not be read: {why}", "run doctor as a role that may read it"
        )


def judge_vacuum(database: DatabaseFacts, config: Config) -> Iterator[CheckResult]:
    """Settings, dead rows, and holders of old snapshots."""
    if database.vacuum is not None:
        yield from _autovacuum(database.settings, database.vacuum, config)
        yield _dead_rows(database.settings, database.vacuum)
    if database.holders is not None:
        yield from _holders(database.holders)
    if not database.sees_all:
        yield skipped(
            "vacuum.sessions",
            "this role does not see the sessions of other roles, so old snapshots may go unnoticed",
            f"run doctor as an administrator, or GRANT pg_read_all_stats TO {database.catalog.user}",
        )


def judge_owner(database: DatabaseFacts, kafka: Kafka | None, config: Config) -> Iterator[CheckResult]:
    """Whether the outbox belongs to this leader group and Kafka cluster (P37)."""
    theirs, ours = database.owner, Owner(config.leader_group_id, kafka.cluster if kafka is not None else None)
    if database.schema_version is None:
        return
    if theirs.excludes(ours):
        advice = "set the right leader_group_id and cluster; or stop those harvesters and run `harvester move`"
        yield problem("outbox.group", f"the outbox belongs to {theirs}, but the configuration has {ours}", advice)
    elif theirs.group is None:
        yield ok("outbox.group", "no leader group has led here yet")
    else:
        yield ok("outbox.group", f"the outbox belongs to {theirs}")


def _autovacuum(settings: Mapping[str, str], vacuum: Vacuum, config: Config) -> Iterator[CheckResult]:
    check = "vacuum.autovacuum"
    off = [name for name in ("autovacuum", "track_counts") if settings.get(name) in _OFF]
    for name in off:
        yield warning(check, f"{name} is off on this server", f"set {name} = on: without it deleted rows stay forever")
    if vacuum.options.get("autovacuum_enabled", "on").lower() in _OFF:
        advice = f"ALTER TABLE {config.table} RESET (autovacuum_enabled)"
        yield warning(check, f"autovacuum is switched off for {config.table}", advice)
    elif not off:
        yield ok(check, f"autovacuum is on; it begins at {_begins(settings, vacuum):,.0f} dead rows")


def _dead_rows(settings: Mapping[str, str], vacuum: Vacuum) -> CheckResult:
    since = "never vacuumed" if vacuum.idle_s is None else f"last vacuumed {age(max(vacuum.idle_s, 0))} ago"
    text = f"{vacuum.dead:,} dead rows, {since}"
    behind = vacuum.dead > max(_BEHIND * _begins(settings, vacuum), _MANY_DEAD)
    if behind and (vacuum.idle_s is None or vacuum.idle_s > _WITHOUT_S):
        advice = "check what holds vacuum back (below), or run VACUUM; with heavy traffic, lower autovacuum_naptime"
        return warning("vacuum.dead_rows", text, advice)
    return ok("vacuum.dead_rows", text)


def _begins(settings: Mapping[str, str], vacuum: Vacuum) -> float:
    def value(name: str) -> float:
        return float(vacuum.options.get(name) or settings.get(name) or 0)

    return value("autovacuum_vacuum_threshold") + value("autovacuum_vacuum_scale_factor") * vacuum.live


def _holders(holders: Sequence[Holder]) -> Iterator[CheckResult]:
    # A holder without an age holds rows for as long as it exists.
    old = [holder for holder in holders if holder.age_s is None or holder.age_s > LONG_S]
    for kind, (what, advice) in _HOLDERS.items():
        names = [
            each.name if each.age_s is None else f"{each.name}, {age(each.age_s)}" for each in old if each.kind == kind
        ]
        if names:
            yield warning(f"vacuum.{kind}", f"{what}: {listed(names)}", advice)
    if not any(holder.kind in _HOLDERS for holder in old):
        yield ok("vacuum.holders", f"nothing has held deleted rows back for more than {age(LONG_S)}")


def sessions_needed(config: Config) -> int:
    """Sessions of one harvester: one per shard, the leader's, one for statistics, one for the archive."""
    return config.limits.shards + _SESSIONS + (config.archive != "off")


def _version(database: DatabaseFacts) -> CheckResult:
    text = f"PostgreSQL {database.settings.get('server_version') or database.version / 10000}"
    if database.version < MINIMUM_SERVER_VERSION:
        advice = f"PostgreSQL {MINIMUM_SERVER_VERSION // 10000} or newer is needed"
        return problem("database.version", f"{text} is too old", advice)
    if database.version < TESTED_VERSION:
        return warning("database.version", f"{text} is not tested", f"use {TESTED_VERSION // 10000} or newer")
    return ok("database.version", text)


def _pooling(database: DatabaseFacts) -> CheckResult:
    check = "database.pooler"
    match database.pooling:
        case Pooling.TRANSACTION:
            return problem(
                check,
                "two sessions were served by one backend: there is a pooler in transaction (or statement) mode",
                "point data_source at PostgreSQL itself, or at a pool in session mode: the harvester keeps settings,"
                " prepared statements and LISTEN in its sessions, and ends those of its predecessor by pid."
                " Applications that write may stay behind the pooler",
            )
        case Pooling.SESSION:
            return warning(
                check,
                "there is a pooler; it keeps a backend for each session",
                "make sure that it stays in session mode, or connect the harvester directly",
            )
        case Pooling.NONE:
            return ok(check, "sessions connect to the server directly")


def _durability(database: DatabaseFacts, config: Config) -> Iterator[CheckResult]:
    settings = database.settings
    off = [name for name in ("fsync", "full_page_writes") if settings.get(name) == "off"]
    for name in off:
        yield problem(
            "database.durability",
            f"{name} is off: a crash of the machine can lose or damage committed data",
            f"set {name} = on, unless the data may be lost",
        )
    commit = settings.get("synchronous_commit", "on")
    if commit in ("off", "local"):
        lost = "a crash" if commit == "off" else "a failover"
        yield warning(
            "database.synchronous_commit",
            f"synchronous_commit is {commit} by default: {lost} can lose transactions whose commit was confirmed to"
            " writers, together with their records. The harvester's own sessions use on",
            "set it to on for the writing roles, if their commits must be durable",
        )
    elif not off:
        yield ok("database.durability", f"fsync is on, synchronous_commit is {commit}")
    if config.delivery == "exactly-once" and database.standbys and not settings.get("synchronous_standby_names"):
        yield warning(
            "database.failover",
            f"{database.standbys} standbys replicate asynchronously: a failover can lose commits, and repeats more,"
            " even exactly-once",
            "set synchronous_standby_names, so that a commit waits for a standby",
        )


def _schema(database: DatabaseFacts, config: Config) -> Iterator[CheckResult]:
    table, check = config.table, "outbox.table"
    try:
        shape = outbox_shape(table, database.catalog)
        sequence, check = database.catalog.sequence, "outbox.tables"
        assert sequence is not None  # outbox_shape rejects a table without
        yield ok("outbox.ids", f"{shape.id_type} ids from {sequence.name}, CACHE {sequence.cache}, no CYCLE")
        check_companions(table, database.catalog, shape)
    except SchemaError as error:
        yield problem(check, error.message, error.hint or INIT_HINT)
        return
    yield ok("outbox.tables", f"{table} and its companion tables fit, and this role may relay")
    known, found, check = ddl.schema_version(), database.schema_version, "outbox.version"
    if found is None:
        yield problem(check, f"{table.term} has no row", INIT_HINT)
    elif found < known:
        yield problem(check, f"the schema has version {found}, but this harvester needs {known}", INIT_HINT)
    elif found > known:
        advice = "use a newer harvester: one has migrated the database"
        yield problem(check, f"the schema has version {found}, but this harvester only supports {known}", advice)
    else:
        yield ok(check, f"schema version {found}")


def _beside(database: DatabaseFacts, config: Config) -> Iterator[CheckResult]:
    if database.catalog.outbox is None or "beside" in database.unread:
        return
    table = config.table
    if not database.lease and database.catalog.term is not None:
        yield warning("outbox.leases", f"{table.lease} is missing", f"{INIT_HINT}; only stashers with a lease need it")
    match database.archive:
        case "missing":
            yield problem("outbox.archive", f"archive is {config.archive}, but {table.archive} is missing", INIT_HINT)
        case "plain":
            text = f"{table.archive} is not partitioned, so it cannot be the archive"
            yield problem("outbox.archive", text, f"rename it, then {INIT_HINT}")
        case "denied":
            grant = f"let the owner run: GRANT INSERT ON {table.archive} TO {database.catalog.user}"
            yield problem("outbox.archive", f"this role may not insert into {table.archive}", grant)
        case "ready":
            yield ok("outbox.archive", f"{table.archive} exists")
    if database.notices is False:
        advice = "`harvester grants` prints what the role needs; quarantining waits until it has it"
        yield problem("outbox.notices", f"this role may not insert notices into {table}", advice)


def _indexes(database: DatabaseFacts, config: Config) -> Iterator[CheckResult]:
    invalid = [index.name for index in database.indexes if not index.valid]
    if invalid:
        advice = f"REINDEX INDEX CONCURRENTLY, or drop: {listed(invalid)} slows each write and serves no query"
        yield warning("outbox.indexes", f"invalid indexes: {listed(invalid)}", advice)
    on_leader = [index.name for index in database.indexes if "leader_id" in index.columns]
    costly = bool(on_leader) and config.marking == "table"
    if costly:
        advice = "drop it: the harvester reads by id, and each mark must also write this index"
        yield warning("outbox.indexes", f"indexes with leader_id: {listed(on_leader)}", advice)
    if database.indexes and not invalid and not costly:
        yield ok("outbox.indexes", listed([index.name for index in database.indexes]))


def _connections(database: DatabaseFacts, config: Config) -> Iterator[CheckResult]:
    if database.connections is None:
        return
    needed = sessions_needed(config)
    free, limit = _free(database.connections)
    text = f"{free} more sessions are free ({limit}), but a harvester needs {needed}"
    if free >= needed:
        yield ok("database.connections", text)
    else:
        # Sessions of a harvester that is already running are among the used ones.
        advice = f"unless a harvester of this outbox is already running: raise {limit}, or lower limits.shards"
        yield warning("database.connections", text, advice)


def _keys(database: DatabaseFacts, config: Config) -> Iterator[CheckResult]:
    """At least once, one record of a key is under way at a time; in a transaction there are many."""
    skew, check = database.skew, "outbox.keys"
    if skew is None or skew.rows < BACKLOG_ROWS:
        return
    text = f"{skew.rows:,} rows with a key at the head, as if {skew.keys:,.0f} keys shared them evenly"
    if config.delivery == "exactly-once" or not skew.is_few:
        yield ok(check, text)
        return
    advice = (
        'with delivery = "exactly-once" many records of one key are under way at a time: 94,000/s of a single key'
        " instead of 1,200. Consumers then need isolation.level=read_committed"
    )
    yield warning(check, f"the backlog consists of few keys: {text}. Each is sent one record at a time", advice)


def _free(facts: Connections) -> tuple[int, str]:
    """How many sessions this role may still open, and the limiting setting. Our own two count as used."""
    bounds = [(facts.most - facts.reserved - facts.used, "max_connections")]
    if facts.role_limit >= 0:
        bounds.append((facts.role_limit - facts.role_used, "the role's CONNECTION LIMIT"))
    if facts.database_limit >= 0:
        bounds.append((facts.database_limit - facts.database_used, "the database's CONNECTION LIMIT"))
    free, name = min(bounds)
    return max(free, 0), name
