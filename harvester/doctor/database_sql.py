"""The statements by which the database is looked at: reads only, each understood from PostgreSQL 13 on."""

from __future__ import annotations

# What RESET would give: our session has set some of these for itself.
SETTINGS = "SELECT name, coalesce(reset_val, '') FROM pg_catalog.pg_settings WHERE name = ANY(%s)"
WANTED_SETTINGS = (
    "autovacuum", "track_counts", "autovacuum_vacuum_threshold", "autovacuum_vacuum_scale_factor", "fsync",
    "full_page_writes", "synchronous_commit", "synchronous_standby_names", "server_version",
    "idle_in_transaction_session_timeout", "max_prepared_transactions",
)  # fmt: skip

# The view's own rule for who may see what other roles do.
SEES_ALL = "SELECT pg_catalog.pg_has_role(current_user, 'pg_read_all_stats', 'USAGE')"

# Whoever does not see all sees of another role's session its user and database, and NULL for what it is: all that have
# both are counted then. That may be a parallel worker too many, but a full server is not taken for an empty one.
CONNECTIONS = """
WITH sessions AS (
    SELECT datid, usesysid FROM pg_catalog.pg_stat_activity
    WHERE backend_type = 'client backend'
       OR (backend_type IS NULL AND datid IS NOT NULL AND usesysid IS NOT NULL)
)
SELECT (SELECT count(*) FROM sessions),
       current_setting('max_connections')::int,
       current_setting('superuser_reserved_connections')::int
           + coalesce(current_setting('reserved_connections', true), '0')::int,
       r.rolconnlimit,
       (SELECT count(*) FROM sessions WHERE usesysid = r.oid),
       d.datconnlimit,
       (SELECT count(*) FROM sessions WHERE datid = d.oid)
FROM pg_catalog.pg_roles r, pg_catalog.pg_database d
WHERE r.rolname = current_user AND d.datname = current_database()
"""

# n_dead_tup and when it was last reduced.
VACUUM = """
SELECT greatest(c.reltuples, s.n_live_tup, 0)::float8, coalesce(s.n_dead_tup, 0), coalesce(c.reloptions, '{}'),
       extract(epoch FROM clock_timestamp() - greatest(s.last_autovacuum, s.last_vacuum))::float8
FROM pg_catalog.pg_class c LEFT JOIN pg_catalog.pg_stat_user_tables s ON s.relid = c.oid
WHERE c.oid = %s
"""

# Whatever has a snapshot of this database; sessions of the standbys' walreceivers with hot_standby_feedback; slots
# that hold rows of tables (catalog_xmin holds the catalog's only); prepared transactions. And whoever has written to
# the outbox for long: its ids are open (P10). Since when others have written is NULL for whoever does not see all.
HOLDERS = """
SELECT 'transaction', format('%%s (pid %%s, %%s)', coalesce(nullif(application_name, ''), usename), pid, state),
       extract(epoch FROM clock_timestamp() - xact_start)::float8
FROM pg_catalog.pg_stat_activity
WHERE backend_xmin IS NOT NULL AND backend_type = 'client backend' AND datname = current_database()
    AND pid <> pg_backend_pid()
UNION ALL
SELECT 'writer', format('%%s (pid %%s, %%s)', coalesce(nullif(a.application_name, ''), a.usename), a.pid, a.state),
       extract(epoch FROM clock_timestamp() - a.xact_start)::float8
FROM pg_catalog.pg_locks l JOIN pg_catalog.pg_stat_activity a USING (pid)
WHERE l.relation = %(outbox)s AND l.mode = 'RowExclusiveLock' AND l.granted AND a.pid <> pg_backend_pid()
    AND a.xact_start IS NOT NULL
    AND l.database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = current_database())
UNION ALL
SELECT 'prepared', gid, extract(epoch FROM clock_timestamp() - prepared)::float8
FROM pg_catalog.pg_prepared_xacts WHERE database = current_database()
UNION ALL
SELECT 'slot', slot_name || CASE WHEN active THEN '' ELSE ' (inactive)' END, NULL
FROM pg_catalog.pg_replication_slots WHERE xmin IS NOT NULL AND NOT active
ORDER BY 3 DESC NULLS FIRST
LIMIT 50
"""

STANDBYS = "SELECT count(*) FROM pg_catalog.pg_stat_replication"

INDEXES = """
SELECT c.relname, i.indisvalid,
       ARRAY(SELECT a.attname FROM pg_catalog.pg_attribute a
             WHERE a.attrelid = i.indrelid AND a.attnum = ANY(i.indkey))
FROM pg_catalog.pg_index i JOIN pg_catalog.pg_class c ON c.oid = i.indexrelid
WHERE i.indrelid = %s
ORDER BY c.relname
"""

# to_regclass, then privileges: neither fails for a table that is missing.
BESIDE = """
SELECT to_regclass(%(lease)s) IS NOT NULL,
       CASE WHEN to_regclass(%(archive)s) IS NULL THEN 'missing'
            WHEN has_table_privilege(to_regclass(%(archive)s)::oid, 'INSERT') THEN 'ready'
            ELSE 'denied' END,
       has_any_column_privilege(to_regclass(%(outbox)s)::oid, 'INSERT')
"""

HEAD_ROWS = 1_000
