"""The statements that were asked for and have no result yet: what they bring, and the places kept for it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from harvester.relay.commands import Fetch, Look, Mark
from harvester.relay.waiting import LaneName


@dataclass(frozen=True, slots=True)
class Part:
    """What a fetch takes from one lane."""

    ids: tuple[int, ...]
    name: LaneName | None  # None: the lane of the shard
    shard: int  # -1: of no lane, a look has found these
    stamp: int


@dataclass(frozen=True, slots=True)
class Statement:
    """`rows`: how many it can bring; `keys`: how many places in flight are kept for them."""

    asked: Mark | Fetch | Look
    rows: int = 0
    keys: int = 0
    parts: Sequence[Part] = ()


class Statements:
    """See the module's text. One thread only."""

    def __init__(self) -> None:
        self.under_way: dict[int, Statement] = {}

    def __len__(self) -> int:
        return len(self.under_way)

    def add(self, asked: Mark | Fetch | Look, rows: int = 0, keys: int = 0, parts: Sequence[Part] = ()) -> None:
        """It is asked for now."""
        self.under_way[asked.number] = Statement(asked, rows, keys, parts)

    def end(self, number: int) -> Statement:
        """Its result is here."""
        return self.under_way.pop(number)

    def abandon(self) -> Iterable[int]:
        """Forget all of them; returns their numbers."""
        numbers = list(self.under_way)
        self.under_way.clear()
        return numbers

    def marks(self) -> int:
        """How many marks are under way."""
        return sum(1 for statement in self.under_way.values() if isinstance(statement.asked, Mark))

    def fetches(self) -> bool:
        """Whether a fetch is under way."""
        return any(isinstance(statement.asked, Fetch) for statement in self.under_way.values())

    def kept(self) -> tuple[int, int]:
        """For how many keys, and rows in all, places are kept."""
        statements = self.under_way.values()
        return sum(statement.keys for statement in statements), sum(statement.rows for statement in statements)

    def kept_for_fetches(self) -> int:
        """For how many keys of fetches: what a mark brings beyond expectation does not get these places."""
        return sum(s.keys for s in self.under_way.values() if isinstance(s.asked, Fetch))

    def parts(self) -> Iterator[Part]:
        """What all of them take from lanes."""
        return (part for statement in self.under_way.values() for part in statement.parts)
