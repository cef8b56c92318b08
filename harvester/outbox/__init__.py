"""The outbox in PostgreSQL: its tables, the sessions that read and settle them, and the stashers that write them.

- *Schema.* `tables` names the tables, `catalog` reads what exists, `shape` decides whether it can be an outbox,
  `schema` creates, checks and migrates; `sql` holds every statement as text.
- *Sessions.* `connection` opens them and distinguishes one outbox from another, `libpq` reads without blocking,
  `leader_session` takes the term and reads rows, `purge_session` is a shard's; `term_loan` lends the term to a bulk
  drain.
- *Writers.* `validation` checks a record, and `stasher` (blocking) or `async_stasher` writes it within the
  application's transaction; `harvester.writers` connects both to other drivers. Under a lease each record has a number
  and is written once: `leases` has the numbers and their verdicts, `lease_steps` the statements.
- *Operation.* `quarantine`, `redrive` and `key_order` for dead letters, `archive`, `overview`, `adoption` of other
  tables.

The life of a row: a stasher inserts it; the leader marks it, in memory or in the row; a shard deletes it once Kafka has
acknowledged the record, or moves it to quarantine; a redrive moves it back, with a new id and a header that holds the
old one.

Failures. Sessions raise `DatabaseUnavailable` (try again) or `SchemaError` (manual intervention is needed). It is
unknown whether a failed statement took effect, and nothing here guesses: purges are repeated, marks are reported.
Stashers raise their driver's errors, since the transaction is the application's; a record that could never be published
is refused (`RecordRejected`) before anything is sent.
"""
