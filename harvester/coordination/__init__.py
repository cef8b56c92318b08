"""Consumers that share the partitions of topics through a Kafka topic alone.

The coordination topic is a write-ahead log. Whoever reads it comes to the same conclusion about who holds what, so
nothing else has to be asked and nobody has to be trusted. A claim, from wanted to held, passes these modules:

    consumer              the application's side; its thread fetches, hands out, commits
    session               a thread that lets coordinator and log meet
    core.coordinator      all claims of one consumer over the worlds of all partitions of the log      pure
    core.fair_share       who is present, what is fair, what is claimed, asked for or given up now     pure
    core.claim            one claim as its client sees it: events in, commands out                     pure
    log                   reads and writes the coordination topic
    core.messages         what is written there, as text                                               pure
    core.world            what is known at a position of the log: claims, holders, positions           pure
    core.partition_buffer records of a held partition, what of them is handed out and processed        pure
    fetcher               records from Kafka into the buffers
    handling              gives records to a handler, in its thread or several; retries, dead letters
    core.record_queues    which record is handled next, and what a failure leads to                      pure
    offsets               Kafka's own group offsets, for tools

Beside that way: `async_consumer` is the application's side in an event loop, `settings` and `events` are for the
application, `topic` makes or refuses the coordination topic, `errors`, `dead_letters` has the topic of records that
were given up, and for people there is `admin` (who holds what; releases, sets positions).

docs/protocol/coordination.md has the messages, the states and the proofs.
"""
