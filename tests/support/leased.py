"""Fixtures: a connection, a stasher, and one under a lease of the name "reader"."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from harvester import LeasedStasher, Stasher


@pytest.fixture
def connection(database: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(database) as opened:
        yield opened


@pytest.fixture
def stasher() -> Stasher:
    return Stasher()


@pytest.fixture
def writer(stasher: Stasher, connection: psycopg.Connection[Any]) -> LeasedStasher:
    return stasher.leased(stasher.lease(connection, "reader"))
