"""NELI: leader election on Kafka's own group membership.

Members of a consumer group subscribe to the leader topic, which has one partition: whoever is assigned it is elected,
and leads for as long as it can prove its place.

- `election` decides, purely, until when leadership may be believed: heartbeats (`heartbeat`) have to come back through
  the topic, and the group's coordinator has to accept commits.
- `member` performs that on Kafka; `topic` makes the leader topic and explains refusals.
- `group` is the interface the relay depends on, and what it is told (`GroupListener`); `fake` implements it without
  Kafka, for users' own tests.

States: OUTSIDE → CANDIDATE (partition 0 is ours) → LEADER (both proofs are fresh, P11, P39) → LEAVING (drains while
the rebalance waits) → OUTSIDE. A leader that is *fenced* becomes a candidate again.

Failures. Trust expires in `election.step`, by local time, before anything else of an event is looked at: a member that
cannot prove its place fences itself before anyone else can be elected. A mark loop that stands still ends leadership
(P14). A heartbeat that Kafka refuses is told once, with its remedy (P41). A client that is answered no more is
replaced.
"""
