"""A fixture for tests of control sockets: `pytest_plugins = ["tests.support.sockets"]`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .control import short_folder


@pytest.fixture
def sockets() -> Iterator[Path]:
    """Where harvesters of this test put their sockets, and where commands look for them."""
    with short_folder() as folder:
        yield folder
