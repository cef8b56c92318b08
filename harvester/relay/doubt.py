"""What was given up and may arrive in Kafka all the same: while it may, no term is released (P24). Pure."""

from __future__ import annotations

import math
from uuid import UUID

from harvester.relay.commands import Release


class Doubt:
    """See the module's text. One thread only."""

    def __init__(self, expiry_s: float, *, fences: bool) -> None:
        """`expiry_s`: how long it may take to arrive; `fences`: whoever comes next fences the lanes, so it cannot."""
        self._expiry_s, self._fences = expiry_s, fences
        self._arose_at = -math.inf
        self._to_release: tuple[int, UUID] | None = None  # the term of a drain, as long as all of it gets settled

    def arise(self, now: float) -> None:
        """Something of this term, or of the one before, may be on its way to Kafka though nobody waits for it."""
        if not self._fences:
            self._arose_at = now
            self.keep_term()

    def keep_term(self) -> None:
        """Something was forgotten that failed on the wire, and may still arrive: the drain's term is not released."""
        self._to_release = None

    def drain(self, term: int | None, holder: UUID | None, now: float) -> None:
        """This term is given up; it is released when all of it is settled, unless something is in doubt by then."""
        in_doubt = now - self._arose_at < self._expiry_s
        self._to_release = (term, holder) if term is not None and holder is not None and not in_doubt else None

    def release(self) -> list[Release]:
        """The drain is over, and all is settled."""
        return [Release(*self._to_release)] if self._to_release is not None else []
