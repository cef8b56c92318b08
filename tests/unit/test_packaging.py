"""What pyproject.toml lists by hand is what the tree holds."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

from setuptools import find_packages

ROOT = Path(__file__).parents[2]


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_package_is_shipped() -> None:
    found = set()
    for folder, package in (("harvester", "harvester"), ("cli/harvester_cli", "harvester_cli")):
        for file in (ROOT / folder).rglob("__init__.py"):
            found.add(".".join((package, *file.parent.relative_to(ROOT / folder).parts)))
    options = project()["tool"]["setuptools"]["packages"]["find"]
    shipped = {name for where in options["where"] for name in find_packages(ROOT / where, include=options["include"])}
    assert shipped == found


def test_every_data_file_is_shipped() -> None:
    data = project()["tool"]["setuptools"]["package-data"]
    for folder, package in (("harvester", "harvester"), ("cli/harvester_cli", "harvester_cli")):
        patterns = [*data["*"], *(f"{folder}/{pattern}" for pattern in data.get(package, ()))]
        for file in (ROOT / folder).rglob("*"):
            if file.is_file() and file.suffix not in (".py", ".pyc"):
                assert any(file.match(pattern) for pattern in patterns), f"{file} would be missing from a wheel"


def test_the_lock_names_every_dependency_and_no_index() -> None:
    lock = (ROOT / "requirements.lock").read_text()
    assert "://" not in lock
    assert "--index" not in lock
    locked = {line.split("==")[0].split("[")[0] for line in lock.splitlines() if "==" in line}
    table = project()["project"]
    for requirement in [
        *table["dependencies"],
        *(r for extra in table["optional-dependencies"].values() for r in extra),
    ]:
        name = requirement.split(">=")[0].split("==")[0].split("[")[0]
        assert name in locked, f"{name}: run scripts/lock"


def test_help_loads_nothing_heavy() -> None:
    program = (
        "import sys, harvester_cli.main\n"
        "print(*{'confluent_kafka', 'psycopg', 'pydantic', 'harvester'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
