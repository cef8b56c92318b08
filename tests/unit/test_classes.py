"""The names of classes and their members, over all modules.

A public name stands for one class. Subclasses of Thread keep clear of Thread's own private names: an override may show
only when a thread ends.
"""

from __future__ import annotations

import ast
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OWN = {name for name in (*dir(threading.Thread), *vars(threading.Thread())) if name.startswith("_")}
TOLD = {"__init__", "__doc__"}


def classes() -> Iterator[ast.ClassDef]:
    for package in ("harvester", "cli"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef):
                    yield node


def threads() -> list[ast.ClassDef]:
    return [node for node in classes() if "threading.Thread" in map(ast.unparse, node.bases)]


def names_of(thread: ast.ClassDef) -> set[str]:
    """What the class defines, and assigns on `self`."""
    defined = {node.name for node in thread.body if isinstance(node, ast.FunctionDef)}
    return defined | {
        node.attr
        for node in ast.walk(thread)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }


@pytest.mark.parametrize("thread", threads(), ids=lambda thread: thread.name)
def test_a_thread_overrides_nothing_that_threading_calls(thread: ast.ClassDef) -> None:
    assert names_of(thread) & OWN <= TOLD


def test_all_are_looked_at() -> None:
    assert {"Purger", "Marker", "Supervisor"} <= {thread.name for thread in threads()}


def test_a_public_name_stands_for_one_class() -> None:
    counts = Counter(node.name for node in classes() if not node.name.startswith("_"))
    assert [name for name, count in counts.items() if count > 1] == []
