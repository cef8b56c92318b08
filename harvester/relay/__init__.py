"""The relay: moves rows from the outbox to Kafka, in the order of each key.

The life of a record, in the order of the files:

1. `core.state_machine` decides, in phases, when anything is read at all; `core.leadership` holds what one leadership
knows. `core.read_planner` decides what the database is asked for next, `marker` asks, and `core.scan` remembers how
far the outbox has been read. `term` takes the term first.

2. `core.dispatcher` decides which shard a row goes to. Rows that cannot be sent yet are remembered by id in
`core.deferred`. `core.ledger` knows every record that was handed out and is not settled.

3. `supervisor` is the thread that runs them, and `performer` performs what they decide. `shard_pool` starts, feeds
   and ends the shard processes; `core.frames` are what travels over their pipes (`ipc`).

4. `shard` is the process that publishes. At least once, `at_least_once` sends records, one of a key at a time
(`core.barrier`). Exactly once, `exactly_once` sends them in transactions (`core.transaction_queue`,
`transaction_intake`).

5. `purger` deletes what Kafka has acknowledged, quarantines what cannot be published, and reports what is settled.

States of a record: read → dispatched or deferred → on the wire → acknowledged → purged or quarantined → settled.
Until its purge has committed, nothing that follows it in its key is sent (P1).

Failures. A record that fails is retried, held in its shard or parked in the supervisor (`core.deferred`), or
quarantined. A shard that dies is replaced; what it had on the wire has an unknown fate and is read again. Everything
that makes the supervisor's knowledge doubtful leads to one remedy, a *remark*: drop what is queued, wait for what is
on the wire, and read again under a new leader id.

`core` is pure: no I/O, clock, thread or randomness.
"""
