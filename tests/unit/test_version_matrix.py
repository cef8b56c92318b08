"""The parts of `scripts/versions` that run without the versions."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from scripts import smoke_parts as smoke  # noqa: E402
from scripts import version_matrix as matrix  # noqa: E402

FINE: dict[str, Any] = {"inserted": 100, "lost": 0, "order_violations": 0, "quarantined": 0, "unexpected": 0,
                        "pending": 0, "duplicates": 0}  # fmt: skip


def test_every_version_once_and_one_at_a_time() -> None:
    done = subprocess.run([ROOT / "scripts" / "versions", "--list"], capture_output=True, text=True, check=True)
    listed = done.stdout.splitlines()
    assert listed == [str(cell) for cell in matrix.cells()]
    assert len(listed) == len(set(listed)) == len(matrix.POSTGRES) + len(matrix.KAFKA) + len(matrix.PYTHON) - 2
    for name, versions in (("PostgreSQL", matrix.POSTGRES), ("Kafka", matrix.KAFKA), ("Python", matrix.PYTHON)):
        for version in versions:
            assert any(f"{name} {version}" in line for line in listed)
    assert set(matrix.PYTHON) == set(_classifiers())


def _classifiers() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = [text.rpartition(" ")[2] for text in project["classifiers"] if "Python :: 3." in text]
    assert found
    return found


@pytest.mark.parametrize(
    ("changed", "left", "delivery", "problem"),
    [
        ({}, 5, "at-least-once", ""),
        ({"duplicates": 3}, 5, "at-least-once", ""),
        ({"duplicates": 3}, 5, "exactly-once", "3 repeated"),
        ({"lost": 2, "order_violations": 1}, 5, "at-least-once", "lost 2, order_violations 1"),
        ({"pending": 7}, 5, "at-least-once", "pending 7"),
        ({"inserted": 99}, 5, "at-least-once", "99 of 100 records were written"),
        ({}, 0, "at-least-once", "it was killed when all was done"),
    ],
)
def test_the_verdict(changed: dict[str, int], left: int, delivery: str, problem: str) -> None:
    assert smoke.judge({**FINE, **changed}, 100, left, delivery).problem == problem


def test_the_configuration_of_a_smoke(tmp_path: Path) -> None:
    servers = smoke.Servers("postgresql://postgres@h:1/postgres", "h:2", "18", "4", Path(sys.executable), tmp_path)
    file = smoke.configuration(servers, "n", delivery="exactly-once", marking="table")
    settings = tomllib.loads(file.read_text())
    assert (settings["delivery"], settings["marking"]) == ("exactly-once", "table")
    assert settings["base_kafka_config"]["bootstrap.servers"] == "h:2"
    assert "dbname=n" in settings["data_source"]


def test_the_page_shows_a_run_in_which_all_hold() -> None:
    page = (ROOT / "docs" / "versions.md").read_text()
    rows = [line for line in page.splitlines() if line.endswith("| holds |")]
    versions = {tuple(row.split(" | ")[:3]) for row in rows}
    assert len(versions) == len(matrix.cells())
