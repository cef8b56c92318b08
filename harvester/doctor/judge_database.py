"""What PostgreSQL is and gives, and whether the tables are what a harvester needs (pure)."""

from __future__ import annotations

from harvester.config import Config
from harvester.doctor.facts import Connections, Database, Kafka, Pooling
from harvester.doctor.findings import Finding, listed, ok, problem, skipped, warning
from harvester.errors import SchemaError
from harvester.outbox import ddl
from harvester.outbox.shape import INIT_HINT, MINIMUM_SERVER_VERSION, OutboxShape, check_companions, outbox_shape
from harvester.outbox.term_session import Owner

TESTED_VERSION = 150000
_SESSIONS = 2  # the mark loop's, and one that looks at the backlog while somebody looks at the status


def judge_database(database: Database, config: Config) -> list[Finding]:
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


def judge_owner(database: Database, kafka: Kafka | None, config: Config) -> list[Finding]:
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


def _version(database: Database) -> Finding:
    text = f"PostgreSQL {database.settings.get('server_version') or database.version / 10000}"
    if database.version < MINIMUM_SERVER_VERSION:
        least = MINIMUM_SERVER_VERSION // 10000
        return problem("database.version", f"{text} is too old", f"PostgreSQL {least} or newer is needed")
    if database.version < TESTED_VERSION:
        least = TESTED_VERSION // 10000
        return warning("database.version", f"{text} is not among those that are tested", f"take {least} or newer")
    return ok("database.version", text)


def _pooling(database: Database) -> Finding:
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


def _durability(database: Database, config: Config) -> list[Finding]:
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


def _schema(database: Database, config: Config) -> list[Finding]:
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


def _sequence(database: Database, shape: OutboxShape) -> Finding:
    sequence = database.catalog.sequence
    assert sequence is not None  # outbox_shape refuses a table without
    return ok("outbox.ids", f"{shape.id_type} ids from {sequence.name}, CACHE {sequence.cache}, no CYCLE")


def _schema_version(database: Database, config: Config) -> Finding:
    known, found = ddl.schema_version(), database.schema_version
    if found is None:
        return problem("outbox.version", f"{config.table.term} has no row", INIT_HINT)
    if found < known:
        return problem("outbox.version", f"the schema has version {found}, this harvester needs {known}", INIT_HINT)
    if found > known:
        advice = "use a newer harvester: the database was migrated by one"
        return problem("outbox.version", f"the schema has version {found}, this harvester knows {known}", advice)
    return ok("outbox.version", f"schema version {found}")


def _beside(database: Database, config: Config) -> list[Finding]:
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


def _indexes(database: Database, config: Config) -> list[Finding]:
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


def _connections(database: Database, config: Config) -> list[Finding]:
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


def _identity(database: Database) -> list[Finding]:
    if database.identity_known:
        return []
    return [
        warning(
            "database.identity",
            "this role may not ask which server it is, so a failover is noticed only by a term that went back",
            f"GRANT EXECUTE ON FUNCTION pg_catalog.pg_control_system() TO {database.catalog.user}",
        )
    ]
