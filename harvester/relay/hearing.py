"""What the shards say: a frame becomes an event of the relay machine, a line of the log, or a figure. Core thread."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from harvester.errors import PoisonRecord, WireError
from harvester.relay import frames as f
from harvester.relay import outcomes
from harvester.relay.commands import Command
from harvester.relay.fleet import Slot
from harvester.relay.machine import Relay
from harvester.telemetry.latency import Histogram

Log = logging.Logger | logging.LoggerAdapter[logging.Logger]


@dataclass(frozen=True, slots=True)
class Tidings:
    """Where news of the shards go besides the machine. All are quick."""

    settled: Callable[[int, float], None]  # records, monotonic time
    latencies: Callable[[Histogram, float], None]
    trouble: Callable[[str, str | None], None]  # of what, what
    failed: Callable[[BaseException], None]
    log: Callable[[int | None], Log]  # by shard
    ready: Callable[[], None]
    session: Callable[[], None]  # a shard has a new database session
    server_changed: Callable[[str, float], None]


def hear(relay: Relay, slot: Slot, index: int, frame: f.Frame, now: float, to: Tidings) -> Sequence[Command]:
    """One frame of one shard; returns what the machine commands. Raises WireError for what no shard says."""
    match frame:
        case f.Settled(ids):
            count, commands = outcomes.settled(relay, index, ids, now)
            slot.settled += count
            to.settled(count, now)
            return commands
        case f.Stats():
            relay.heard(index, now)
            slot.stats = frame
            if frame.latency:
                to.latencies(_latencies(frame.latency), now)
        case f.Remarked(epoch, ids, in_doubt):
            return relay.remarked(index, epoch, ids, now, in_doubt)
        case f.Parked(epoch, record_id, given_back, error, wait_s, attempts, held):
            what = "holds its key" if held else "will be retried"
            to.log(index).warning("record %d failed (attempts %d) and %s: %s", record_id, attempts, what, error)
            return outcomes.parked(relay, index, epoch, record_id, given_back, wait_s, held, now)
        case f.InDoubt(record_id):
            outcomes.in_doubt(relay, index, record_id, now)
        case f.Refused(epoch, ids):
            return outcomes.refused(relay, index, epoch, ids, now)
        case f.Dropped(ids):
            return outcomes.dropped(relay, index, ids, now)
        case f.FateUnknown(epoch, ids, reason):
            to.log(index).error("the fate of records %s is unknown: %s", list(ids), reason)
            slot.suspected += len(ids)
            return outcomes.fate_unknown(relay, index, epoch, ids, f"fate unknown: {reason}", now)
        case f.QueueTimedOut(epoch, record_id, waited_s):
            return outcomes.queue_timed_out(relay, index, epoch, record_id, waited_s, now)
        case f.Ready(pid):
            slot.ready = True
            to.ready()
            to.log(index).debug("ready (pid %d)", pid)
            return relay.shard_ready(index, now)
        case f.Session(pid, started):
            slot.session = (pid, started)
            to.session()
        case f.ServerChanged(reason):
            to.server_changed(reason, now)
        case f.Quarantined(record_id, error):
            slot.quarantined += 1
            to.log(index).error("record %d went to quarantine: %s", record_id, error)
        case f.Poisoned(record_id, error):
            to.failed(PoisonRecord(record_id, error))
        case f.Log(level, text):
            to.log(index).log(level, "%s", text)
        case f.Trouble(text):
            to.trouble(f"shard {index}", text)
        case _:
            raise WireError(f"shard {index} sent {type(frame).__name__}, which only a supervisor sends")
    return ()


def _latencies(text: str) -> Histogram:
    try:
        return Histogram.unpack(bytes.fromhex(text))
    except ValueError as error:
        raise WireError("a shard's latencies are no histogram") from error
