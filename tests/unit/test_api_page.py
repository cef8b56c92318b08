"""docs/api.md is what the sources say, and has all that is public."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from scripts import apipage, modulemap

PAGE = Path(__file__).parents[2] / "docs" / "api.md"


def test_the_page_is_made_from_the_sources() -> None:
    assert PAGE.read_text(encoding="utf-8") == apipage.page(), "run scripts/api"


def test_the_map_of_the_code_is_what_the_modules_say() -> None:
    assert PAGE.with_name("map.md").read_text(encoding="utf-8") == modulemap.page() + "\n", "run scripts/map"


@pytest.mark.parametrize("package", ["harvester", "harvester.idempotence", "harvester.serializers"])
def test_everything_that_a_package_exports_is_on_it(package: str) -> None:
    exported = {f"{package}.{name}" for name in importlib.import_module(package).__all__}
    elsewhere = {"harvester.idempotence.Origin", "harvester.Inbox", "harvester.AsyncInbox"}  # from another package
    assert exported - elsewhere <= apipage.public_names()


def test_what_is_on_it_can_be_imported() -> None:
    for full in apipage.public_names():
        module, _, name = full.rpartition(".")
        if module != "harvester.writers.django":  # needs the settings of a Django project
            assert hasattr(importlib.import_module(module), name), full


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ("harvester: Stasher", "`Stasher(table: str | OutboxTable = 'outbox', *, lease_time: timedelta = "),
        ("harvester.status: ShardStatus", "- `in_flight: int`: sent, not settled\n"),
        ("harvester: AsyncStasher", "- `async stash(target: AsyncTarget, record: OutboxRecord) -> int`\n\n    W"),
        ("harvester.idempotence: SeenIds", "- `classmethod from_bytes(data: bytes) -> SeenIds`: "),
        ("harvester: LeaseExpired", "A kind of `LeaseError`."),
        ("harvester.origin: find", "`find(headers: Any, name: str = HEADER) -> bytes | None`"),
    ],
)
def test_how_an_entry_looks(found: str, expected: str) -> None:
    module, _, name = found.partition(": ")
    entry = apipage.entry(module, name)
    assert entry.startswith(f"### {name}\n\n`from {module} import {name}`\n")
    assert expected in entry
