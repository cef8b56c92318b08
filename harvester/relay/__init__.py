"""The relay: moves rows from the outbox to Kafka, in the order of each key.

Processes and threads. One *supervisor* process: `supervisor` is its main thread, `marker` its thread for the database.
N *shard* processes (`shard`), each with a thread for frames, one for Kafka and one for purges. The *elector*
(`elector`) holds the place in Kafka's group; it and the shards are forks of a server (`forkserver`). `core` holds the
decisions, pure; everything else performs them.

The life of a record
====================

1. *Read.* `core.state_machine` decides whether anything is read at all, `core.read_planner` what is asked for next.
   `marker` asks, on a session whose term it has taken (`term`); `core.scan` remembers how far the outbox has been read
   and which ids below may still appear.
2. *Dispatched or deferred.* `core.dispatcher` decides which shard a row goes to. One that cannot be sent yet, because
   its key has failed or has enough under way, or its shard takes nothing, is remembered by its id (`core.deferred`)
   and fetched again later. `core.ledger` knows every record that was handed out and is not settled.
3. *On the pipe.* `supervisor` performs the decision; `shard_pool` starts, feeds and ends the shard processes;
   `core.frames` are what travels over their pipes (`ipc`).
4. *On the wire.* At least once, `at_least_once` sends one record of a key at a time (`core.barrier`). Exactly once,
   `transaction_intake` queues records (`core.transaction_queue`) and `exactly_once` sends them in transactions on the
   shard's lane (`harvester.delivery.lane`). Trust is checked immediately before.
5. *Acknowledged, purged.* `purger` deletes what Kafka has acknowledged. Until that has committed, nothing that follows
   in the key is sent (P1); then the barrier falls, and the shard says *settled*.
6. *Settled.* The supervisor forgets it, and plans on.

States of a record: read → dispatched or deferred → queued → on the wire → acknowledged → purged or quarantined →
settled. States of a leadership: see `core.state_machine`.

Failures
========

- *A delivery* (`at_least_once.Sender._failed`, `transaction_intake.Refusals`): the record is tried again from its shard
  (*held*), handed back to the supervisor until its time has come (*parked*), or quarantined, as
  `harvester.delivery.retries` judges.
- *A parked record* (`StateMachine.parked`, `core.deferred`): its key is deferred; every further row of it waits behind.
- *A commit* (`exactly_once.Transactor`) is clear, refused (undo it, find out who is at fault) or unclear (open the lane
  anew).
- *A purge* (`purger.Purger._attempt`) is repeated over a new connection until it succeeds. Rows that others have locked
  are tried apart (`_retry_locked`).
- *A quarantine* (`purger.Purger._settle_poison`) is repeated. Where the term is another's, the record is given up, and
  read again by whoever leads.
- *A mark that was sent* (`marker.Marker._lost`, `StateMachine.statement_failed`): its effect is unknown, so *remark*.
- *A shard that dies* (`Supervisor._shard_ended`, `StateMachine.shard_died`): *remark*, and a new process
  within a budget.
- *Trust that expires.* `harvester.neli.election` decides when; shards compare the moment before every record
  (`ipc.trust_check`) and drop what is queued; the supervisor is fenced (`StateMachine.fence`).
- *A supervisor that dies, or stands still*: its shards finish their wire, and its elector leaves the group when nothing
  can be published any more, so that another harvester leads. *An elector that does*: the supervisor is fenced.
- *The term taken by others* (`term`, `StateMachine.term_lost`): taken again while trusted, else given up.
- *Another database, or ids that start again* (`marker`, `harvester.outbox.purge_session`,
  `StateMachine.server_changed`): all shards are killed, and the term is taken anew (P9).

A *remark* is the one remedy for everything that makes the supervisor's knowledge doubtful: drop what is queued, wait
for what is on the wire, and read again under a new leader id.
"""
