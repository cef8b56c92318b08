"""What a client knows of one claim of its own: the state of the machine in `claims`. Pure data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from harvester.coordination.messages import Client, Place
from harvester.coordination.world import NO_GENERATION


class Phase(Enum):
    """See `claims`."""

    IDLE = "idle"
    CLAIMING = "claiming"
    FINDING = "finding"
    HELD = "held"
    LEAVING = "leaving"


_OFFSET_BITS = 20  # beside them there is room for the time until 2248 in 64 bits
HOLDING = (Phase.FINDING, Phase.HELD, Phase.LEAVING)


@dataclass(frozen=True, slots=True)
class Pace:
    """In seconds of the local clock. `margin_s`: for a clock that runs slow, and to finish what is in hand."""

    interval_s: float
    margin_s: float

    @property
    def interval_ms(self) -> int:
        """As messages say it."""
        return round(self.interval_s * 1000)

    @property
    def beat_every_s(self) -> float:
        """The seed's bound is one interval between two heartbeats in the log."""
        return self.interval_s / 2

    @property
    def trust_s(self) -> float:
        """How long the sending of an accepted message proves that the claim is ours."""
        return 2 * self.interval_s - self.margin_s


class BatchStep(Enum):
    """What a batch waits for."""

    CLAIMED = "its ClaimingMessages read back"
    COMMITTED = "its Heartbeat read back"


@dataclass(frozen=True, slots=True)
class Batch:
    """At most once: records up to `last_offset`, and the number of the message that is awaited."""

    last_offset: int
    step: BatchStep
    number: int


@dataclass(frozen=True, slots=True)
class Holding:
    """The machine's state. `proof_at`: when the newest message that was read back as accepted was sent."""

    place: Place
    client: Client
    phase: Phase = Phase.IDLE
    number: int = 0  # of the last message
    claim_number: int = 0  # of the claim that is awaited
    generation: int = NO_GENERATION
    won_ms: int = 0  # in log time
    confirmed: int = NO_GENERATION
    last_offset: int | None = None
    proof_at: float = -math.inf
    sent: tuple[tuple[int, float], ...] = ()  # what has not been read back, and when it was sent
    next_beat_at: float = math.inf
    batch: Batch | None = None
    at_most_once: bool = False

    @property
    def token(self) -> int:
        """The fencing token of the claim: log time in ms, and the low bits of the generation where that stands still.

        Offsets begin again in a coordination topic that is new, or was made anew. Time does not, so whoever claims
        later has the greater token, also while some consumers use the old topic and others the new one.
        """
        return (self.won_ms << _OFFSET_BITS) | (self.generation & ((1 << _OFFSET_BITS) - 1))

    def awaits(self, number: int) -> bool:
        """Whether this message was sent, and nothing has been read back since: not it, nor one behind it."""
        return any(known == number for known, _ in self.sent)

    def trusted_until(self, pace: Pace) -> float:
        """The moment at which another may hold the place."""
        return self.proof_at + pace.trust_s if self.phase in HOLDING else -math.inf

    def hand_out_until(self, pace: Pace) -> float:
        """At least once: the moment from which on no record may be given to the application."""
        return self.proof_at + min(pace.interval_s, pace.trust_s) if self.phase is Phase.HELD else -math.inf

    def may_fetch(self, now: float, pace: Pace) -> bool:
        """At most once: whether another batch may be proposed."""
        return self.phase is Phase.HELD and self.batch is None and now < self.trusted_until(pace)
