"""A smoke test of `scripts/versions`: the installed command under load, stopped gracefully, killed, and judged.

While four sessions write records of the same keys, a first harvester is stopped by SIGTERM; while they write again, a
second one is killed by SIGKILL, and a third one drains the outbox. `verify` compares what was committed with what Kafka
holds.
"""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

from scripts.smoke_parts import (
    LOAD,
    Broken,
    Outbox,
    Servers,
    Verdict,
    configuration,
    ended,
    log_end,
    outbox,
    run,
    running,
    until,
    verified,
)


def smoke(servers: Servers, delivery: str, marking: str, records: int) -> Verdict:
    """On a database, a topic and a group of its own."""
    with outbox(servers, "smoke") as made:
        config = configuration(servers, made.name, delivery=delivery, marking=marking)
        try:
            left = _life(servers, config, made, records)
            return verified(servers, config, made.name, records, left, delivery)
        except Broken as error:
            return Verdict(problem=f"{error}; log: {log_end(config)}")


def _life(servers: Servers, config: Path, made: Outbox, records: int) -> int:
    # How many records were still to come at SIGKILL.
    def leads(led: int, process: subprocess.Popen[bytes]) -> None:
        until(lambda: made.term() > led, f"term {led + 1} is taken", process)

    run(servers, config, "init", "--notify")
    load = ("--topic", made.name, "--records", str(records // 2), *LOAD)
    with running(servers, config, "start") as first:
        leads(0, first)
        with running(servers, config, "pump", *load) as pump:
            until(lambda: made.gone() >= records // 8, "some records are gone", first, pump)
            first.send_signal(signal.SIGTERM)
            ended(first, "the harvester that was stopped")
            ended(pump, "the pump")
    with running(servers, config, "start") as second:
        leads(1, second)
        with running(servers, config, "pump", "--append", *load) as pump:
            until(lambda: made.gone() >= records // 2 + records // 8, "more records are gone", second, pump)
            second.kill()
            second.wait()
            to_come = max(0, records - made.gone())
            with running(servers, config, "start") as third:
                ended(pump, "the pump")
                leads(2, third)
                until(lambda: not made.rows(), "the outbox is empty", third)
                third.send_signal(signal.SIGTERM)
                ended(third, "the last harvester")
    return to_come
