"""Whether a consumer keeps up with what it holds (seed 003 leaves it to the consumer to let go when it does not). Pure.

A place falls behind when its lag has grown at each of the last `samples` looks, one an interval, and is now more than
the records that were processed in all that time: at this speed it is not to be caught up with. It is then released if
somebody present holds less, who can claim it. Otherwise letting go would only make it wait.
"""

from __future__ import annotations

from collections import deque
from itertools import pairwise


class Health:
    """Of one place under one claim."""

    __slots__ = ("_looks",)

    def __init__(self, samples: int = 4) -> None:
        if samples < 2:
            raise ValueError("a trend takes two samples")
        self._looks: deque[tuple[int, int]] = deque(maxlen=samples)  # next offset to process, end of the partition

    def look(self, next_offset: int, end_offset: int) -> None:
        """Once an interval: where the consumer is, and where the partition ends."""
        self._looks.append((next_offset, end_offset))

    @property
    def falls_behind(self) -> bool:
        """See the module's text."""
        if len(self._looks) < (self._looks.maxlen or 0):
            return False
        lags = [end - position for position, end in self._looks]
        processed = self._looks[-1][0] - self._looks[0][0]
        return all(later > earlier for earlier, later in pairwise(lags)) and lags[-1] > processed
