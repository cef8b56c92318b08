"""Delivery: from a row to a record in Kafka, in either mode.

`decode` turns the bytes of a row into a record, `partitioner` chooses its partition and its shard. `retries` decides
what a failed delivery means: wait (the path is at fault), retry a few times and then quarantine (the record is at
fault), or end the process (the producer is at fault).

Exactly-once mode adds *lanes*: a transactional producer and a partition of the progress topic each. `lane` opens a
lane, fencing its previous owner, and decides whether a commit is clear. `progress` is the record that ends each
transaction and names what was committed and is not yet purged; `progress_topic` creates and checks the topic.

Failures. Nothing here gives up a record: callers (`harvester.relay`) hold, park, quarantine or read it again. An
unclear outcome in Kafka is resolved by reopening the lane and reading its progress.
"""
