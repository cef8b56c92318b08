"""Golden transcripts of the coordination log: text files in which a log goes in and the world that it makes comes out.

A file is a run of blocks with a blank line between them. Each has a command with its lines, `----`, and what came of
it:

    log                                 appends, and reads as a reader from offset 0 does
    1000 a.1 claim                      at 1000 ms, instance 1 of client a claims partition 0 of the topic
    1200 b.1 beat/2 gen=5 at=12         a heartbeat for partition 2; gen, conf (confirmed) and at (the offset) as given
    1300 raw Heartbeat v9 …             anything else
    ----
    1 @1200 b.1 Heartbeat: refused

    reader from=3                       what a reader knows that begins there
    reader without=2,3                  the same, from a log in which records are missing

HARVESTER_REWRITE=1 writes the answers anew; what changed is then read in the diff.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from harvester.coordination.core.messages import (
    ClaimingMessages,
    ClaimingPartition,
    Client,
    GroupPartition,
    Heartbeat,
    Message,
    ReleasingPartition,
    ReturningMessages,
    SettingPosition,
    Unreadable,
    encode,
)
from harvester.coordination.core.world import SET_TO_START, Claim, LogTiming, Reading, World

TIMING = LogTiming(interval_ms=1000, clock_step_ms=250)
Record = tuple[int, int, bytes]  # offset, append time, value


@dataclass
class Transcript:
    """One log, and the reader of all of it."""

    log: list[Record] = field(default_factory=list)
    world: World = field(default_factory=lambda: World.begin(TIMING))

    def answer(self, block: list[str]) -> list[str]:
        command, *words = block[0].split()
        if command == "log":
            return self._append(block[1:])
        given = dict(word.split("=", 1) for word in words)
        match command, given:
            case "reader", {"from": offset}:
                return _known(self._replay(World.begin(TIMING, int(offset)), self.log))
            case "reader", {"without": offsets}:
                missing = {int(offset) for offset in offsets.split(",")}
                return _known(self._replay(World.begin(TIMING), [r for r in self.log if r[0] not in missing]))
        raise ValueError(f"unknown command {block[0]!r}")

    def _append(self, lines: list[str]) -> list[str]:
        said = []
        for line in lines:
            at, who, what = line.split(maxsplit=2)
            value = what.encode() if who == "raw" else encode(_message(who, what))
            record = (len(self.log), int(at), value)
            self.log.append(record)
            said += [_line(record, reading) for reading in self.world.read(*record)]
        return said + _known(self.world)

    @staticmethod
    def _replay(world: World, log: list[Record]) -> World:
        for record in log:
            if record[0] >= world.next_offset:
                world.read(*record)
        return world


def _message(who: str, what: str) -> Message:
    client, instance = who.rsplit(".", 1)
    verb, *words = what.split()
    verb, _, partition = verb.partition("/")
    given = {name: None if text == "-" else int(text) for name, text in (word.split("=") for word in words)}
    place = GroupPartition("billing", "orders", int(partition or 0))
    said = (place, Client(client, instance), given.get("n") or 0, given.get("gen"), given.get("conf"))
    match verb:
        case "claim":
            return ClaimingPartition(*said)
        case "beat":
            return Heartbeat(*said, given.get("at"))
        case "release":
            return ReleasingPartition(*said, given.get("at"))
        case "messages":
            return ClaimingMessages(*said, given["at"] or 0)
        case "return":
            return ReturningMessages(*said, given.get("at"))
        case "set":
            return SettingPosition(*said, given.get("at"))
    raise ValueError(f"unknown verb {verb!r}")


def _line(record: Record, reading: Reading) -> str:
    offset, at, _ = record
    message = reading.message
    if message is None or isinstance(message, Unreadable):
        return f"{offset} @{at} {reading.verdict.value}: {message.reason if message else 'again'}"
    where = f" [{message.place.partition}]" if message.place.partition else ""
    client = message.client
    return f"{offset} @{at} {client.id}.{client.instance} {type(message).__name__}{where}: {reading.verdict.value}"


def _known(world: World) -> list[str]:
    said = [f"log time {world.now_ms}"]
    said += [_claim(world, place, claim) for place, claim in sorted(world.claims.items())]
    waiting = sorted(world.waiting("billing"))
    return said + ([f"asking: {', '.join(waiting)}"] if waiting else [])


def _claim(world: World, place: GroupPartition, claim: Claim) -> str:
    freshness = claim.freshness(world.now_ms, world.timing).value
    holder = f"{claim.holder.id}.{claim.holder.instance}, {freshness}" if claim.holder else freshness
    last = {None: "-", SET_TO_START: "start"}.get(claim.last_offset, str(claim.last_offset))
    commit = 0 if claim.last_offset is None else claim.last_offset + 1
    position = f"last offset {last} (group commit {commit})" if claim.positioned else f"last offset {last} or later"
    proposed = "" if claim.proposed is None else f", messages up to {claim.proposed} claimed"
    certain = "" if claim.exact else ", not certain"
    return f"{place.topic}[{place.partition}]: {holder}, generation {claim.generation}, {position}{proposed}{certain}"
