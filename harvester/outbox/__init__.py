"""The outbox in PostgreSQL: its tables, the sessions that read and settle them, and the stashers that write them.

- *Schema.* `tables` names the tables, `shape` says which forms of an outbox are accepted, `catalog` reads what is
  there, `schema` creates, checks and migrates; `sql` holds every statement as text.
- *Sessions.* `connection` opens them and tells one outbox from another, `libpq` reads without blocking,
  `leader_session` takes the term and reads rows, `purge_session` is a shard's; `term_loan` lends the term to a bulk
  drain.
- *Writers.* `stasher` and `async_stasher` write records within the application's transaction, `leases` and
  `lease_steps` number those that must be written once, `validation` refuses what could never be published.
- *Operation.* `quarantine`, `redrive` and `key_order` for dead letters, `archive`, `overview`, `adoption` of other
  tables.

Failures. Sessions raise `DatabaseUnavailable` (try again) or `SchemaError` (somebody has to act). Whether a statement
that failed took effect is unknown, and nobody here guesses: purges are repeated, marks are reported.
"""
