"""`scripts/record`: a session on a terminal, each screen as it has to be, and the pictures of the documentation."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from scripts.recording._picture import svg
from scripts.recording._tmux import WIDTH, Tmux, Unseen
from tests.support.cli import cli_environment
from tests.support.control import short_folder
from tests.support.longs import long
from tests.support.servers import Servers

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"
SCREENS = [
    "init", "init-again", "start", "watch", "watch-paused", "start-paused", "watch-9-shards", "watch-8-shards",
    "watch-resumed", "scale", "start-scaled", "watch-shard", "watch-quarantine", "dashboard", "drained",
    "watch-quarantine-before", "dead-list", "dead-redrive", "dead-list-empty", "watch-quarantine-after", "start-ended",
    "watch-ended", "verdict",
]  # fmt: skip

needs_tmux = pytest.mark.skipif(shutil.which("tmux") is None, reason="no tmux: run scripts/tmux, or install it")


@long  # what it shows, test_start, test_watch, test_control, test_dead_cli and test_dashboard_tmux try one by one
@needs_tmux
@pytest.mark.timeout(900)
def test_a_session_from_init_to_a_graceful_stop(servers: Servers, tmp_path: Path) -> None:
    """The script checks the screens; here is looked whether it got to the end, and what it wrote."""
    out, pictures = tmp_path / "out", tmp_path / "pictures"
    pictures.mkdir()
    command = [sys.executable, "-m", "scripts.recording", "--out", str(out), "--pictures", str(pictures)]
    command += ["--dsn", servers.dsn, "--bootstrap", servers.bootstrap, "--within", "240"]
    with subprocess.Popen(
        command, cwd=ROOT, env=cli_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            told = process.communicate(timeout=700)[0]
        except subprocess.TimeoutExpired:
            process.terminate()  # it removes what it has made
            raise AssertionError(process.communicate()[0]) from None
    assert process.returncode == 0, told
    assert [path.stem.partition("-")[2] for path in sorted(out.glob("*.txt"))] == SCREENS

    def screen(name: str) -> str:
        return next(out.glob(f"[0-9][0-9]-{name}.txt")).read_text(encoding="utf-8")

    assert re.search(r"^billing-1  PAUSED for", screen("watch-paused"), re.MULTILINE)
    assert "quarantined 1" in screen("dashboard")
    assert "Nothing is lost or out of order." in screen("verdict")
    assert sorted(path.name for path in pictures.iterdir()) == ["dashboard.svg", "watch.svg"]
    for picture in out.glob("*.svg"):
        ElementTree.fromstring(picture.read_text(encoding="utf-8"))


@needs_tmux
def test_a_screen_that_is_not_as_it_has_to_be_is_shown() -> None:
    with short_folder() as folder:
        tmux = Tmux(folder, {"COLUMNS": "40"}, within_s=120)
        try:
            window = tmux.window()
            assert window.wait_for_prompt(window.type("printf '\\033[1;32mgreen\\033[0m\\n'; (exit 7)")) == 7
            seen = window.see("^green$")
            tmux.within_s = 0.3
            with pytest.raises(Unseen, match=r"(?s)'blue' not seen and the command has ended:\n.*green"):
                window.see("green", "blue")
            window.type("cat")
            with pytest.raises(Unseen, match=r"no prompt within 0\.3 s"):
                window.wait_for_prompt(window.type("some words"))
            assert not window.is_alternate()
        finally:
            tmux.close()
    drawn = svg(seen, "a title", WIDTH)
    assert "a&#160;title" in drawn
    assert ">green</text>" in drawn


@pytest.mark.parametrize("name", ["dashboard", "watch"])
def test_the_pictures_of_the_documentation(name: str) -> None:
    drawn = (IMAGES / f"{name}.svg").read_text(encoding="utf-8")
    ElementTree.fromstring(drawn)
    assert "LEADING" in drawn
    assert not re.search(r"[0-9a-f]{8}-[0-9a-f]{4}-", drawn), "ids are short on a screen"
    assert name != "dashboard" or "in&#160;quarantine" in drawn, "what stands there is not passed over"
    assert "url(http" not in drawn  # it is the same for whoever is offline
    assert f"(docs/images/{name}.svg)" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"(images/{name}.svg)" in (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
