"""What happens to a claim, and what its machine (`claims`) wants done. Pure data."""

from __future__ import annotations

from dataclasses import dataclass

from harvester.coordination.messages import Message, Place
from harvester.coordination.rationalizer import Verdict

# -- events


@dataclass(frozen=True, slots=True)
class TryClaim:
    """Claim the place. `known`: the newest generation that the log certainly has, None if that is not certain."""

    known: int | None


@dataclass(frozen=True, slots=True)
class ReadBack:
    """A message of this very instance was read in the log. Position and log time are what the log knows after it."""

    message: Message
    offset: int
    verdict: Verdict
    last_offset: int | None
    positioned: bool
    at_ms: int = 0


@dataclass(frozen=True, slots=True)
class Taken:
    """The log says that the claim is not ours any more."""

    reason: str


@dataclass(frozen=True, slots=True)
class Found:
    """The position under which the claim of this generation was won, from all that is kept of the log."""

    generation: int
    last_offset: int | None
    positioned: bool = True


@dataclass(frozen=True, slots=True)
class NotSent:
    """A message did not reach the log, or nobody knows whether it did."""

    number: int


@dataclass(frozen=True, slots=True)
class Progressed:
    """At least once: everything up to this offset is processed."""

    last_offset: int


@dataclass(frozen=True, slots=True)
class Fetched:
    """At most once: a batch that ends with this offset waits to be processed."""

    last_offset: int


@dataclass(frozen=True, slots=True)
class Release:
    """Give the place up, in good order."""

    reason: str


@dataclass(frozen=True, slots=True)
class Drained:
    """Nothing of the place is handed out any more. At most once, what is ours behind `last_offset` never was."""

    last_offset: int | None


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passes."""


Event = TryClaim | ReadBack | Taken | Found | NotSent | Progressed | Fetched | Release | Drained | Tick

# -- commands


@dataclass(frozen=True, slots=True)
class Append:
    """Write this to the log."""

    message: Message


@dataclass(frozen=True, slots=True)
class LookBack:
    """Find the position in the log before this offset; answer with Found."""

    place: Place
    generation: int


@dataclass(frozen=True, slots=True)
class Begin:
    """The place is held: consume behind `last_offset`, or further if that is not certain (`positioned`)."""

    place: Place
    generation: int
    last_offset: int | None
    positioned: bool = True


@dataclass(frozen=True, slots=True)
class Process:
    """At most once: the batch up to this offset is ours, for ever."""

    place: Place
    generation: int
    last_offset: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Hand out nothing more of the place. `lost`: it may be another's already; else answer with Drained."""

    place: Place
    generation: int
    reason: str
    lost: bool


@dataclass(frozen=True, slots=True)
class Missed:
    """The claim was not won."""

    place: Place


Command = Append | LookBack | Begin | Process | Stop | Missed
