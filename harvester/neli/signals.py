"""What the election is told, and what it asks for: events and commands. Values only; times as in `election`."""

from __future__ import annotations

from dataclasses import dataclass

# -- events


@dataclass(frozen=True, slots=True)
class Assigned:
    """The group gave us partition 0."""


@dataclass(frozen=True, slots=True)
class RevokeBegan:
    """The rebalance callback that takes partition 0 away has started; the group waits for us."""


@dataclass(frozen=True, slots=True)
class Revoked:
    """Partition 0 is no longer ours."""


@dataclass(frozen=True, slots=True)
class HeartbeatReturned:
    """Our own heartbeat, sent at this time, was read from partition 0."""

    sent_at: float


@dataclass(frozen=True, slots=True)
class ForeignHeartbeat:
    """Another member's heartbeat was read; `term` is None while it had none."""

    member: str
    term: int | None


@dataclass(frozen=True, slots=True)
class CommitSucceeded:
    """An offset commit sent at this time was accepted by the group coordinator.

    `stable_at`: a rebalance that this member has not answered began later than that.
    """

    sent_at: float
    stable_at: float


@dataclass(frozen=True, slots=True)
class TermTaken:
    """The relay leads under this term."""

    term: int


@dataclass(frozen=True, slots=True)
class StepDown:
    """The relay gives leadership up itself (P8: the term is somebody else's)."""

    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passes. `marker_alive`: the mark loop turned lately, or waits inside its own bounded retry (P14)."""

    marker_alive: bool


Event = (
    Assigned
    | RevokeBegan
    | Revoked
    | HeartbeatReturned
    | ForeignHeartbeat
    | CommitSucceeded
    | TermTaken
    | StepDown
    | Tick
)

# -- commands


@dataclass(frozen=True, slots=True)
class SendHeartbeat:
    """Produce a heartbeat to partition 0."""


@dataclass(frozen=True, slots=True)
class CommitOffset:
    """Commit the position: the second proof."""


@dataclass(frozen=True, slots=True)
class Acquire:
    """Lead, from now on and while trusted."""


@dataclass(frozen=True, slots=True)
class Trust:
    """Both proofs hold; leadership may be believed until then."""

    until: float


@dataclass(frozen=True, slots=True)
class Fence:
    """Stop at once: another leader may exist."""

    reason: str


@dataclass(frozen=True, slots=True)
class Rejoin:
    """Leave the group, and join it with a client that is new."""

    reason: str


Command = SendHeartbeat | CommitOffset | Acquire | Trust | Fence | Rejoin
