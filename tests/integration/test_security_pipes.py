"""A shard that writes garbage into its pipe costs itself, never the supervisor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harvester import State
from harvester.failpoints import VARIABLE
from tests.support.garbage import DIRECTORY, LETHAL, Hostile
from tests.support.harvesting import Scene
from tests.support.wait import eventually

pytest_plugins = ["tests.support.scenes"]


def test_the_supervisor_outlives_what_its_shards_write(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    written = tmp_path / "garbage"
    written.mkdir()
    monkeypatch.setenv(DIRECTORY, str(written))
    monkeypatch.setenv(VARIABLE, f"{Hostile.__module__}:Hostile")
    # A pause grows with the deaths of a window; here each is to be replaced at once.
    given: dict[str, Any] = {"restart_budget": 1000, "restart_window": "1ms"}
    values = [str(number) for number in range(100)]
    scene.add(*[(f"k{int(value) % 7}", value) for value in values])
    with scene.embedded(**given) as running:
        eventually(lambda: len(list(written.iterdir())) == len(LETHAL), 120, "all garbage written")
        scene.wait_left()
        running.wait_ready()
        status = running.harvester.status()
        assert status.state is State.LEADING
        assert sum(shard.restarts for shard in status.shards) == len(LETHAL)
        scene.add(("k0", "afterwards"))
        scene.wait_left()
    ended = [record for record in caplog.records if "ended unexpectedly" in record.message]
    assert len(ended) == len(LETHAL)
    expected: dict[str | None, list[str | None]] = {}
    for value in [*values, "afterwards"]:
        expected.setdefault("k0" if value == "afterwards" else f"k{int(value) % 7}", []).append(value)
    assert scene.published() == expected
