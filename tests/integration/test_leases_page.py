"""The example of docs/outbox.md: it copies everything once, whatever stops it on the way."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from harvester import LeaseFenced, Stasher
from tests.support.leasing import lease_row, values

pytestmark = pytest.mark.servers

PAGE = (Path(__file__).parents[2] / "docs" / "outbox.md").read_text()
LINES = [f"line {n}" for n in range(1, 31)]


class Power(Exception):
    """It is gone."""


class Failing(list[str]):
    """A source that fails behind its first lines of each reading; before that, something may happen."""

    def __init__(self, lines: list[str], good: int, before: Callable[[], object] = lambda: None) -> None:
        super().__init__(lines)
        self.good, self.before = good, before

    def __getitem__(self, what: Any) -> Any:
        return self._read(super().__getitem__(what))

    def _read(self, lines: list[str]) -> Iterator[str]:
        yield from lines[: self.good]
        self.before()
        if len(lines) > self.good:
            yield lines[self.good]
            raise Power


def example() -> Callable[[str, list[str]], None]:
    (code,) = [code for code in re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S) if "lines-reader" in code]
    place: dict[str, Any] = {}
    exec(compile(code, "outbox.md", "exec"), place)
    copy: Callable[[str, list[str]], None] = place["copy"]
    return copy


def test_it_goes_on_where_it_was_stopped(database: str) -> None:
    copy = example()
    for good in (0, 3, 7):
        with pytest.raises(Power):
            copy(database, Failing(LINES, good))
    copy(database, LINES[:20])
    copy(database, LINES)
    copy(database, LINES)
    assert values(database) == LINES
    row = lease_row(database, "lines-reader")
    assert row is not None
    assert (row["sequence"], row["upstream_position"], row["generation"]) == (30, "30", 6)


def test_it_is_fenced_by_a_second_one(database: str) -> None:
    def another() -> None:
        with psycopg.connect(database) as connection:
            Stasher().lease(connection, "lines-reader")

    copy = example()
    with pytest.raises(LeaseFenced):
        copy(database, Failing(LINES, 5, another))
    assert values(database) == LINES[:5]
    copy(database, LINES)
    assert values(database) == LINES


def test_the_page_names_everything() -> None:
    for name in ("LeaseFenced", "SequenceGap", "LeaseExpired", "LeaseUnknown", "lease_many", "raised()", "seek("):
        assert name in PAGE
