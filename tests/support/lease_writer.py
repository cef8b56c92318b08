"""A process that copies an upstream log of numbers into the outbox, and goes on where the one before it was killed.

python -m tests.support.lease_writer DSN autocommit|transaction|batch LAST
"""

from __future__ import annotations

import sys

import psycopg

from harvester import Stasher

from .leasing import record

BATCH = 3


def main(dsn: str, mode: str, last: int) -> None:
    """Each number up to `last`, once; says on standard output up to which it knows that they are written."""
    with psycopg.connect(dsn, autocommit=mode != "transaction") as connection:
        stasher = Stasher()
        lease = stasher.lease(connection, "copy")
        writer = stasher.leased(lease)
        at = int(lease.position or 0)
        print(at, flush=True)
        assert at == lease.sequence, "a number is a record here"
        while at < last:
            numbers = range(at + 1, min(last, at + (BATCH if mode == "batch" else 1)) + 1)
            at = numbers[-1]
            if mode == "autocommit":
                writer.stash(connection, record(at), position=str(at))
            elif mode == "batch":
                writer.stash_many(connection, [record(n) for n in numbers], position=str(at))
            else:
                with writer.transaction(connection):
                    writer.stash(connection, record(at), position=str(at))
            print(at, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
