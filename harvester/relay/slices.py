"""What the supervisor knows of each shard: whether it takes rows, and when it was last heard. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Slice:
    """What is known of one shard: whether it takes rows. `surplus`: rows sent since its pipe was full.

    `opening`: it has yet to find out what its predecessor has published (exactly-once mode).
    """

    ready: bool = False
    opening: bool = False
    congested: bool = False
    heard_at: float = 0.0
    surplus: int = 0


class Slices(list[Slice]):
    """One for each shard, by its index. One thread only."""

    def __init__(self, shards: int, send_buffer: int) -> None:
        """`send_buffer`: how many rows a shard whose pipe is full is sent all the same."""
        super().__init__(Slice() for _ in range(shards))
        self._send_buffer = send_buffer

    def takes(self, index: int) -> bool:
        """Whether rows may be sent to this shard."""
        state = self[index]
        return state.ready and not state.opening and (not state.congested or state.surplus < self._send_buffer)

    def all_take(self) -> bool:
        """Whether rows may be sent to every shard, and none of their pipes is full."""
        return all(state.ready and not (state.opening or state.congested) for state in self)

    def congested(self, index: int) -> None:
        """Its pipe takes nothing at the moment."""
        state = self[index]
        if not state.congested:
            state.congested, state.surplus = True, 0

    def uncongested(self, index: int) -> None:
        """Its pipe takes frames again."""
        self[index].congested = False

    def resize(self, shards: int) -> None:
        """There are this many shards now."""
        del self[shards:]
        self.extend(Slice() for _ in range(shards - len(self)))
