"""Where the group stands in Kafka, asked for the claims that begin. Thin.

The group's coordinator may be slow, or away, while the brokers of all other places answer: so it is asked by a thread,
and only the claims that begin wait for it. One question at a time, for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from harvester.clock import clock_s
from harvester.coordination.hands import Hands
from harvester.coordination.messages import Place
from harvester.coordination.question import Question
from harvester.errors import BrokerUnavailable

Committed = dict[Place, int | None]  # the next offset; None if the group has none


class Inquiry:
    """See the module's text. Belongs to the consumer's thread; `ask` is called from the other one.

    When a question had no answer, the next one is asked `again_s` later.
    """

    def __init__(self, ask: Callable[[Collection[Place]], Committed], again_s: float) -> None:
        self._question, self._again_s = Question(ask), again_s
        self._answers: dict[Hands, int | None] = {}  # an older claim's would be out of date
        self._asked: list[Hands] = []
        self._ask_at = 0.0

    def look(self, begun: Iterable[Hands]) -> dict[Hands, int | None]:
        """The answers for these claims so far; asks for the others. Raises BrokerError if there never will be one."""
        self._take()
        wanted = list(begun)
        self._answers = {hands: self._answers[hands] for hands in wanted if hands in self._answers}
        if not self._question.is_open and len(self._answers) < len(wanted) and clock_s() >= self._ask_at:
            self._asked = [hands for hands in wanted if hands not in self._answers]
            self._question.put([hands.place for hands in self._asked])
        return self._answers

    def _take(self) -> None:
        try:
            committed = self._question.take()
        except BrokerUnavailable:
            self._ask_at = clock_s() + self._again_s
            return
        if committed is None:
            return
        self._answers |= {hands: committed[hands.place] for hands in self._asked if hands.place in committed}
        if len(committed) < len(self._asked):
            self._ask_at = clock_s() + self._again_s
