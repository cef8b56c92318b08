"""Held places of which nothing comes, although there is something (see `standstill`). Thin.

The ends of partitions that come with what is fetched say nothing here, so they are asked for, of all places that are
silent at once, and by another client: a question on the connection of a fetch waits behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from harvester.coordination.messages import Place
from harvester.coordination.question import Question
from harvester.coordination.standstill import Standstill
from harvester.errors import BrokerUnavailable

_LEAST_S = 5.0


class Stalls:
    """See the module's text. `ends`: the offsets behind the last records; called from another thread."""

    def __init__(self, ends: Callable[[Collection[Place]], Mapping[Place, int]], interval_s: float) -> None:
        self._question = Question(ends)
        self._standstill = Standstill[Place](max(2 * interval_s, _LEAST_S))

    def look(self, waiting: Mapping[Place, int], now: float) -> list[Place]:
        """Once an interval. `waiting`: what the client reads next, for all places of which it had nothing just now.

        Returns those that stand still.
        """
        known = dict(self._standstill.positions)
        for place in known.keys() - waiting.keys():
            self._standstill.forget(place)
        for place, position in waiting.items():
            if known.get(place) != position:
                self._standstill.read(place, position - 1, now)
        ends = self._ends()
        stalled = [
            place for place, end in ends.items() if place in waiting and self._standstill.is_there(place, end - 1, now)
        ]
        for place in stalled:
            self._standstill.forget(place)
        silent = [place for place, position in waiting.items() if known.get(place) == position]
        if silent and not self._question.is_open:
            self._question.put(silent)
        return stalled

    def _ends(self) -> Mapping[Place, int]:
        try:
            return self._question.take() or {}
        except BrokerUnavailable:
            return {}
