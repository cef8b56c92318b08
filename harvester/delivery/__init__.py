"""Delivery: from a row to a record in Kafka, in either mode.

`decode` turns the bytes of a row into a record, `partitioner` chooses its partition and shard, `retries` says what a
failed delivery means and when to try again. Exactly-once mode adds the `lane`, a shard's transactional identity;
`progress`, the record that names what a transaction committed; and `progress_topic`, where those records live.
"""
