"""What was asked and is not answered yet, and when. Pure.

An answer that comes late is credited to the moment at which *it* was asked, never to a later one: so each is numbered.
"""

from __future__ import annotations


class Asked:
    """`number`: of the last one. What is asked for longer than `patience_s` is forgotten: its answer proves nothing."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._at: dict[int, float] = {}
        self.number = 0

    def ask(self, now: float) -> int:
        """The number of what is asked now."""
        oldest = now - self._patience_s
        self._at = {number: at for number, at in self._at.items() if at > oldest}
        self.number += 1
        self._at[self.number] = now
        return self.number

    def take(self, number: int) -> float | None:
        """When that was asked; None when it was not, is forgotten, or was taken before."""
        return self._at.pop(number, None)

    def clear(self) -> None:
        """Forget all of them."""
        self._at.clear()
