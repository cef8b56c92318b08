"""Delivery: from a row to a record in Kafka, in either mode.

`decode` turns the bytes of a row into a record, `partitioner` chooses its partition and its shard. `retries` says what
a failed delivery means: wait (the path is at fault), try again a few times and then quarantine (the record is), or end
the process (the producer is).

Exactly-once mode adds a *lane* for each shard: a transactional producer, and a partition of the progress topic. `lane`
opens it, fencing whoever had it, and says whether a commit is clear. `progress` is the record that ends each
transaction and names what was committed and is not yet purged; `progress_topic` makes and checks the topic.

Failures. Nothing here gives up a record: callers (`harvester.relay`) hold, park, quarantine or read it again. What is
unclear in Kafka is settled by opening the lane anew and reading its progress.
"""
