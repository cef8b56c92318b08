"""The fixture `make` of the tests of the inbox; by `pytest_plugins`, so that it is loaded once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.inbox import Ledger, Make


@pytest.fixture
def make(empty_database: str) -> Iterator[Make]:
    """Applications on one database, of the same group."""
    made: list[Ledger] = []

    def new(**options: Any) -> Ledger:
        made.append(Ledger(empty_database, **options))
        return made[-1]

    yield new
    for ledger in made:
        ledger.db.close()
