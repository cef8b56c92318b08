"""NELI: leader election based on Kafka's own group membership.

Members of a consumer group subscribe to the leader topic, which has one partition: the member it is assigned to is
elected, and leads for as long as it can prove its place.

- `election`, which is pure, decides until when leadership may be believed: heartbeats (`heartbeat`) must come back
  through the topic, and the group's coordinator must accept commits.
- `member` carries this out on Kafka; `topic` creates the leader topic and explains refusals.
- `group` is the interface the relay depends on, and the listener it calls (`GroupListener`); `fake` implements it
  without Kafka, for users' own tests.

States: OUTSIDE → CANDIDATE (partition 0 is ours) → LEADER (both proofs are fresh, P11, P39) → LEAVING (drains while the
rebalance waits) → OUTSIDE. A leader that is *fenced* becomes a candidate again.

Failures. Trust expires in `election.step`, by local time, before anything else of an event is considered: a member that
cannot prove its place fences itself before another can be elected. A stalled mark loop ends leadership (P14). A
heartbeat that Kafka refuses is reported once, with its remedy (P41). A client that no longer gets answers is replaced.
"""
