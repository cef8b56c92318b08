"""Consumers that share the partitions of topics through a Kafka topic alone.

The coordination topic is a write-ahead log. Every reader draws the same conclusion about who holds what, so nothing
else has to be asked and nobody has to be trusted. A claim, from wanted to held, passes through these modules:

    consumer              the application's side; its thread fetches, hands out, commits
    session               a thread that connects coordinator and log
    core.coordinator      all claims of one consumer over the worlds of all partitions of the log      pure
    core.fair_share       who is present, what is fair, what is claimed, requested or given up now     pure
    core.claim            one claim as its client sees it: events in, commands out                     pure
    log                   reads and writes the coordination topic
    core.messages         the messages in it, as text                                                  pure
    core.world            what is known at a position of the log: claims, holders, positions           pure
    core.partition_buffer records of a held partition: which are handed out and processed              pure
    fetcher               records from Kafka into the buffers
    handling              gives records to a handler, in its thread or several; retries, dead letters
    core.record_queues    which record is handled next, and the consequence of a failure               pure
    offsets               Kafka's own group offsets, for tools

In addition, `async_consumer` is the application's side in an event loop, `settings` and `events` are for the
application, `topic` creates or refuses the coordination topic, `errors` has the errors, `dead_letters` the topic of
records that were given up, and `admin` is for people (shows who holds what; releases, sets positions).

docs/protocol/coordination.md describes the messages, the states and the proofs.
"""
