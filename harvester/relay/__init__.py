"""The relay: moves rows from the outbox to Kafka, in the order of each key.

Processes and threads. The *supervisor* process has two threads: `supervisor`, its main thread, and `marker`, its
database thread. N *shard* processes (`shard`) each have a thread for frames, one for Kafka and one for purges. The
*elector* (`elector`) holds this harvester's place in the Kafka group; it and the shards are forked from a server
process (`forkserver`). The decisions are in `core` and are pure; all other modules carry them out.

The life of a record
====================

1. *Read.* `core.state_machine` decides whether anything may be read, `core.read_planner` which statement comes next.
   `marker` executes it on the session with which it took the term (`term`); `core.scan` tracks how far the outbox has
   been read and which lower ids may still appear.
2. *Dispatched or deferred.* `core.dispatcher` decides which shard a row goes to. A row that cannot be sent yet, because
   its key has failed, its key has enough rows under way or its shard accepts nothing, is remembered by its id
   (`core.deferred`) and fetched again later. `core.ledger` knows every record that was handed out and is not settled.
3. *On the pipe.* `supervisor` carries out the decision; `shard_pool` starts, feeds and ends the shard processes;
   `core.frames` defines the messages on their pipes (`ipc`).
4. *On the wire.* At least once, `at_least_once` sends one record of a key at a time (`core.barrier`). Exactly once,
   `transaction_intake` queues records (`core.transaction_queue`) and `exactly_once` sends them in transactions on the
   shard's lane (`harvester.delivery.lane`). Trust is checked immediately before sending.
5. *Acknowledged, purged.* `purger` deletes what Kafka has acknowledged. Nothing that follows in the key is sent until
   the DELETE has committed (P1); then the barrier falls, and the shard reports the record *settled*.
6. *Settled.* The supervisor forgets the record and plans the next read.

States of a record: read → dispatched or deferred → queued → on the wire → acknowledged → purged or quarantined →
settled. `core.state_machine` describes the states of a leadership.

Failures
========

- *A delivery fails* (`at_least_once.Sender._failed`, `transaction_intake.Refusals`): the shard retries the record
  (*held*), hands it back to the supervisor until its retry is due (*parked*), or quarantines it, as
  `harvester.delivery.retries` decides.
- *A record is parked* (`StateMachine.parked`, `core.deferred`): its key is deferred, and all further rows of the key
  wait behind it.
- *A commit* (`exactly_once.Transactor`) is clear, refused (undo it and find the record at fault) or unclear (reopen the
  lane).
- *A purge fails* (`purger.Purger._attempt`): it is repeated over a new connection until it succeeds. Rows locked by
  other sessions are retried separately (`_retry_locked`).
- *A quarantine fails* (`purger.Purger._settle_poison`): it is repeated. If the term belongs to another leader, the
  record is given up and read again by that leader.
- *A mark was sent and failed* (`marker.Marker._lost`, `StateMachine.statement_failed`): its effect is unknown, so
  *remark*.
- *A shard dies* (`Supervisor._shard_ended`, `StateMachine.shard_died`): *remark*, and start a new process if the
  restart budget allows it.
- *Trust expires.* `harvester.neli.election` decides when; shards compare the expiry with the clock before every record
  (`ipc.trust_check`) and drop what is queued; the supervisor is fenced (`StateMachine.fence`).
- *The supervisor dies or hangs*: its shards finish what is on the wire, and its elector leaves the group once nothing
  more can be published, so that another harvester leads. *The elector dies or hangs*: the supervisor is fenced.
- *Another process takes the term* (`term`, `StateMachine.term_lost`): it is taken again while the group trusts this
  process, otherwise leadership is given up.
- *The database is another one, or its ids start again* (`marker`, `harvester.outbox.purge_session`,
  `StateMachine.server_changed`): all shards are killed, and the term is taken again (P9).

A *remark* is the single remedy whenever the supervisor's knowledge is in doubt: drop what is queued, wait for what is
on the wire, and read again under a new leader id.
"""
