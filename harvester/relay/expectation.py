"""What the next mark will bring, judged by the last ones: how many new keys, how many bytes. Pure.

Theory. A mark names a number of rows; what has to be bounded are the keys in flight (I3) and the memory that rows take.
How many rows bring a key that is not in flight, and how large they are, was so for the last marks and will be nearly so
for the next: both are learnt as means that forget. Where the expectation fails nothing breaks: rows for whose keys
there is no room wait in their lanes (`harvester.relay.sorting`), and the next expectation is higher.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from harvester.relay.ledger import Row

_WEIGHT = 0.3  # of the last mark
_LEAST_SHARE = 0.02
_MARGIN = 1.25
_MOST_BYTES = 1 << 28  # of rows that are unsettled or asked for
_FIRST_ROWS = 100  # while nothing is known of their size


class Expectation:
    """See the module's text. One thread only."""

    def __init__(self) -> None:
        self._share = 1.0  # of rows whose key was not in flight
        self._row_bytes = 0.0

    def learn(self, rows: Sequence[Row], new_keys: int) -> None:
        """A mark has brought these rows, with keys that were not in flight (or would not have fitted)."""
        if not rows:
            return
        self._share += (max(new_keys / len(rows), _LEAST_SHARE) - self._share) * _WEIGHT
        row_bytes = sum(len(row[2]) for row in rows) / len(rows)
        self._row_bytes += (row_bytes - self._row_bytes) * (_WEIGHT if self._row_bytes else 1.0)

    def rows(self, keys: int) -> int:
        """How many rows may be asked for where there is room for so many keys."""
        return int(keys / self._expected) if self._row_bytes else min(_FIRST_ROWS, keys)

    def keys(self, rows: int) -> int:
        """For how many keys so many rows need room."""
        return math.ceil(rows * self._expected)

    def bound(self, rows: int) -> int:
        """So many rows, or as many as there is memory for."""
        return min(rows, max(1, int(_MOST_BYTES / self._row_bytes))) if self._row_bytes else rows

    @property
    def _expected(self) -> float:
        return min(1.0, self._share * _MARGIN)
