"""Builds the peers with Go and Maven, their ordinary clients, and a cache for the results.

Only the first run downloads. Missing tools are reported before anything is started.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from harvester.stack.java import cache_directory

HERE = Path(__file__).parent
_TIMEOUT_S = 1_800


def missing(*programs: str) -> list[str]:
    """Those that are not on PATH."""
    return [program for program in programs if shutil.which(program) is None]


def goharvest() -> Path:
    """The program that runs one goharvest v0.3.1."""
    built = _cache("goharvest-0.3.1")
    program = built / "goharvest"
    if not program.is_file():
        source = HERE / "goharvest"
        for name in ("main.go", "go.mod", "go.sum"):
            shutil.copy(source / name, built / name)
        _run(["go", "build", "-o", "unfinished", "."], built, CGO_ENABLED="1")
        (built / "unfinished").rename(program)
    return program


def jars(project: str) -> Path:
    """The directory with the jars of a Maven project of this directory, and of all it depends on."""
    built = _cache(f"maven-{project}")
    found = built / "jars"
    if not found.is_dir():
        shutil.copy(HERE / project / "pom.xml", built / "pom.xml")
        goal = ["dependency:copy-dependencies", "-DincludeScope=runtime", f"-DoutputDirectory={built / 'unfinished'}"]
        _run(["mvn", "-q", "-B", *goal], built)
        (built / "unfinished").rename(found)
    return found


def aiokafka() -> tuple[str, str] | None:
    """The command of a consumer by aiokafka 0.14, in an environment of its own; None where pip does not find it."""
    built = _cache("aiokafka-0.14.0")
    python = built / "bin" / "python"
    if not (built / "complete").exists():
        _run([sys.executable, "-m", "venv", str(built)], built)
        done = subprocess.run(
            [python, "-m", "pip", "install", "-q", "aiokafka==0.14.0"], capture_output=True, timeout=_TIMEOUT_S,
            check=False,
        )  # fmt: skip
        if done.returncode:
            return None
        (built / "complete").touch()
    return str(python), str(HERE / "aiokafka" / "consume.py")


def _cache(name: str) -> Path:
    path = cache_directory() / "peers" / name
    path.mkdir(parents=True, exist_ok=True)
    return path


def _run(command: Sequence[str], cwd: Path, **environment: str) -> None:
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, check=False,
        timeout=_TIMEOUT_S,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {done.returncode}\n{(done.stdout + done.stderr)[-3000:]}")
