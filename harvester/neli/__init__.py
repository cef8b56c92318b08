"""NELI: leader election on Kafka's own group membership.

Members of a consumer group subscribe to the leader topic, which has one partition: whoever is assigned it is elected.
`election` is the machine that decides how long that may be believed, from heartbeats (`heartbeat`) that come back and
commits that the group accepts; `member` performs what it decides. `topic` makes the leader topic. `group` is the
interface the relay depends on, `fake` an implementation without Kafka for users' own tests.

States: STANDBY → elected → LEADING while both proofs are fresh (P11, P39) → drained and revoked, or fenced → STANDBY.

Failures. A member that cannot prove its place fences itself before anyone else can be elected. A heartbeat that Kafka
refuses is told once, with its remedy (P41).
"""
