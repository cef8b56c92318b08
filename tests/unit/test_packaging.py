"""Locks, names and messages fit the distribution. What is in it: tests/packaging/test_wheel.py."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_locks_name_every_dependency_and_no_index() -> None:
    names = ("requirements.lock", "requirements-spark.lock", "requirements-demo.lock", "deploy/requirements.lock")
    lock = "".join((ROOT / name).read_text() for name in names)
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


# On the package index the name `harvester` is somebody else's.
FORMER = re.compile(
    r"pip install (?:--?\S+ )*['\"]?harvester\b|(?<![\w-])harvester\[[a-z]|version\(['\"]harvester['\"]\)"
)


@pytest.mark.parametrize(
    ("text", "former"),
    [
        ("pip install harvester", True),
        ("pip install -U 'harvester[spark]'", True),
        ("`harvester[http]`", True),
        ('metadata.version("harvester")', True),
        ("pip install outbox-harvester", False),
        ("pip install 'outbox-harvester[spark]'", False),
    ],
)
def test_the_former_name_is_recognised(text: str, former: bool) -> None:
    assert bool(FORMER.search(text)) is former


def test_nothing_names_the_distribution_that_is_not_ours() -> None:
    assert project()["project"]["name"] == "outbox-harvester"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found = []
    for name in filter(None, listed.split("\0")):
        file = ROOT / name
        if file == Path(__file__) or not file.is_file() or file.suffix in (".png", ".jar", ".gz"):
            continue
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
        found += [f"{name}:{number}: {line.strip()}" for number, line in enumerate(lines, 1) if FORMER.search(line)]
    assert not found, "\n".join(found)


# Of the checkout; a wheel has none of them.
NOT_IN_A_WHEEL = re.compile(r"\bdocs/|\bscripts/|\b[\w-]+\.md\b|sample-config|\brequirements\.lock")


def test_messages_name_no_file_that_a_wheel_does_not_have() -> None:
    found = []
    for file in [*(ROOT / "harvester").rglob("*.py"), *(ROOT / "cli").rglob("*.py")]:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        docstrings = {
            id(node.body[0].value)
            for node in ast.walk(tree)
            if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
        }
        found += [
            f"{file.relative_to(ROOT)}:{node.lineno}: {node.value}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
            if id(node) not in docstrings and NOT_IN_A_WHEEL.search(node.value)
        ]
    for file in sorted((ROOT / "cli" / "harvester_cli" / "units").iterdir()):
        lines = file.read_text(encoding="utf-8").splitlines()
        found += [f"{file.name}: {line}" for line in lines if "https://" not in line and NOT_IN_A_WHEEL.search(line)]
    assert not found, "\n".join(found)


def test_help_loads_nothing_heavy() -> None:
    program = (
        "import sys, harvester_cli.main\n"
        "print(*{'confluent_kafka', 'psycopg', 'pydantic', 'multiprocess', 'rich'} & set(sys.modules))\n"
        "print(*{name for name in sys.modules if name.startswith('harvester.')} - {'harvester.errors'})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
