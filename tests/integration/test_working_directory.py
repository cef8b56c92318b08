"""A harvester imports nothing from the directory that it is started in, and neither do its children."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cli import cli_environment
from tests.support.harvesting import Scene, causal, shards_of
from tests.support.wait import eventually

pytest_plugins = ["tests.support.scenes"]

# Of the library and of what the harvester depends on: some are imported before a shard's own code, some by it.
NAMES = ("types", "inspect", "random", "string", "heapq", "dill", "psycopg", "harvester", "multiprocess")


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A directory of modules each of which notes who imported it, and fails."""
    place = tmp_path / "hostile"
    place.mkdir()
    for name in NAMES:
        (place / f"{name}.py").write_text(
            "import os\n"
            f"open({str(place)!r} + f'/{name}.imported-by-{{os.getpid()}}', 'w').close()\n"
            f"raise ImportError({name!r} + ' of the working directory')\n"
        )
    return place


def test_the_files_would_be_imported(hostile: Path) -> None:
    done = subprocess.run([sys.executable, "-c", "import random"], cwd=hostile, capture_output=True, check=False)
    assert done.returncode != 0
    assert list(hostile.glob("*.imported-by-*"))


def test_a_harvester_in_a_directory_with_hostile_modules(scene: Scene, hostile: Path) -> None:
    harvester = Path(sys.executable).parent / "harvester"
    config = scene.config_file()
    with (hostile / "log").open("wb") as log:
        running = subprocess.Popen(
            [harvester, "start", "-f", config],
            cwd=hostile, env=cli_environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        scene.add(("a", "1"), ("b", "1"))

        def published() -> bool:
            assert running.poll() is None, (hostile / "log").read_text()
            return not scene.left()

        eventually(published, what="an empty outbox")
        assert len(shards_of(running.pid)) == 2
        running.terminate()
        assert running.wait(60) == 0
    finally:
        if running.poll() is None:
            running.kill()
            running.wait()
    assert scene.term() == 1
    assert scene.published() == causal(("a", "b"), 1)
    assert [file.name for file in hostile.glob("*.imported-by-*")] == []
    assert not os.path.lexists(hostile / "__pycache__")
