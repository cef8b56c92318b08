"""Consumers that share the partitions of topics through a Kafka topic alone.

The coordination topic is a write-ahead log. Whoever reads it comes to the same conclusion about who holds what, so
nothing else has to be asked and nobody has to be trusted. From the log upwards:

    messages        what is written there, as text                                             pure
    placement       which partition of the log speaks of which partition of a topic            pure
    world           what is known at a position of the log: claims, holders, positions         pure
    rationalizer    the one transition: world and record to world and verdict                  pure
    claims          one claim as its client sees it: events in, commands out                   pure
    signals         those events and commands; `holding` is the state between them             pure
    share           who is present, what is fair, which partition is next                      pure
    choice          which of them is claimed, asked for or given up now                        pure
    coordinator     all claims of one consumer over the worlds of all partitions of the log    pure
    standstill      whether a reader has stopped though there is more                          pure
    topic, log      the coordination topic, made or refused; reading and writing it
    past            what stands in it before the tail that is read
    session         a thread that lets the coordinator and the log meet

    starting        at which offset a held partition is consumed                               pure
    lot             records that are handed out while a claim is good                          pure
    progress        what of the delivered records is processed without a hole                  pure
    hands           both of one partition, with what was fetched and waits                     pure
    health          whether a consumer keeps up with what it holds                             pure
    feed            records from Kafka into the hands
    stalls          held partitions that the client has stopped to fetch
    lots            which partition's turn it is
    standing        how far the group is behind
    offsets         Kafka's own group offsets, for tools (asked for without waiting: `question`, `inquiry`)
    consumer        all of it for the application (`consumer_settings`, `events`, `figures`)

    overview        who holds what, for people (`admin` looks, and sets positions)             pure
    errors          why consumers cannot coordinate, or cannot go on                           pure

docs/protocol/coordination.md has the messages, the states and the proofs.
"""
