"""The relay's decisions, pure: events in, commands out. No I/O, clock, thread or randomness.

The supervisor owns `state_machine`, which owns the rest: `leadership`, `read_planner`, `dispatcher`, `ledger`,
`deferred`. `messages` are the commands it returns and the reports it receives. `scan` belongs to the marker (its low
watermark to the state machine), `barrier` and `transaction_queue` to the shards, `frames` to both ends of the pipes.
"""
