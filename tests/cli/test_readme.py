"""Every command and every example of the README and docs/embedding.md is run here, or says why not."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

from tests.support.cli import cli_environment, run_cli
from tests.support.control import at
from tests.support.harvesting import Scene, wait_leads
from tests.support.terminal import OnTerminal
from tests.support.wait import eventually

pytest_plugins = ["tests.support.scenes", "tests.support.sockets"]

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()

ELSEWHERE = {
    "scripts/demo": "run by tests/cli/test_demo.py through `harvester demo`, which it starts",
    "scripts/test": "this suite",
    "pip install .": "installs into the environment that is under test",
    "pip install '.[stack]'": "installs into the environment that is under test",
    "harvester systemd install --system": "run by tests/cli/test_systemd_install.py, into a directory of its own",
}
RUN = {
    "harvester init",
    "harvester start --shards 8",
    "harvester watch",
    "harvester pause",
    "harvester scale 4",
    "harvester doctor",
}


def blocks(language: str, text: str = README) -> list[str]:
    """The fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def commands() -> set[str]:
    """What stands behind a prompt, without its comment."""
    lines = [line for block in blocks("console") for line in block.splitlines() if line.startswith("$ ")]
    return {line[2:].split("  #")[0].strip() for line in lines}


def test_every_command_is_known_here() -> None:
    assert commands() == RUN | set(ELSEWHERE)


@pytest.mark.timeout(600)
def test_the_commands_of_the_readme_run(scene: Scene, sockets: Path) -> None:
    control = {"socket": "auto"}
    config = scene.config_file(control=control)
    environment = {"HARVESTER_CONFIG": str(config), **at(sockets)}

    def said(command: str) -> str:
        assert command in commands() | {"harvester resume"}
        return run_cli(*command.split()[1:], env=environment).stdout

    said("harvester init")
    (statement,) = blocks("sql")
    with scene.cli("--shards", "8", env=environment, control=control) as running:
        wait_leads(running)
        with OnTerminal("watch", env=environment) as terminal:
            terminal.wait_for(r"LEADING for[\s\S]*p pause", 120)
            terminal.press("q")
            assert terminal.wait() == 0
        assert said("harvester pause").startswith("test: paused")
        assert "4 shards instead of 8" in said("harvester scale 4")
        with psycopg.connect(scene.dsn, autocommit=True) as connection:
            connection.execute(statement.replace("'orders'", f"'{scene.topic}'").encode())
        assert said("harvester resume").startswith("test: resumed")
        scene.wait_left(timeout_s=60)
        # The servers of the tests forgo what a doctor asks for; what matters here is that it looked at them.
        doctor = run_cli("doctor", env=environment, check=False)
        assert doctor.returncode in (0, 1), doctor.stderr
        assert "database.version" in doctor.stdout
        assert running.stop(signal.SIGTERM) == 0
    assert scene.published() == {"customer-42": ['{"total": 99}']}


def test_the_stashing_example_runs(scene: Scene) -> None:
    (example,) = [block for block in blocks("python") if "Stasher" in block]
    with psycopg.connect(scene.dsn, autocommit=True) as connection:
        connection.execute("CREATE TABLE orders (id int, state text)")
        connection.execute("INSERT INTO orders VALUES (7, 'open')")
        exec(compile(example, "README.md", "exec"), {"connection": connection})
        rows = connection.execute("SELECT kafka_topic, kafka_key FROM outbox").fetchall()
    assert rows == [("orders", "customer-42")]


@pytest.mark.parametrize("interrupt", [signal.SIGINT])
def test_the_embedding_example_runs(scene: Scene, tmp_path: Path, interrupt: signal.Signals) -> None:
    (example,) = [block for block in blocks("python") if "with Harvester" in block]
    assert len(example.splitlines()) <= 10
    script = tmp_path / "embedded.py"
    script.write_text(example)
    scene.add(("a", "1"))
    environment = cli_environment({"HARVESTER_CONFIG": str(scene.config_file())})
    process = subprocess.Popen([sys.executable, str(script)], env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("this process leads, term")
        scene.wait_left()
    finally:
        process.send_signal(interrupt)
        process.wait(30)
    assert scene.published() == {"a": ["1"]}


def test_the_fake_group_of_the_embedding_page_runs(scene: Scene) -> None:
    text = (ROOT / "docs" / "embedding.md").read_text()
    (example,) = [block for block in blocks("python", text) if "FakeGroup()" in block]
    seen: list[object] = []
    exec(compile(example, "embedding.md", "exec"), {"config": scene.config(), "seen": seen})
    eventually(lambda: len(seen) == 4, what="four events")
    assert [type(event).__name__ for event in seen] == [
        "LeaderAcquired",
        "LeaderRevoked",
        "LeaderAcquired",
        "LeaderFenced",
    ]


def test_the_scheduler_of_the_decision_on_schedules_runs(scene: Scene) -> None:
    page = (ROOT / "docs" / "adr" / "0019-no-schedule-no-expiry-no-priorities.md").read_text()
    table, step = blocks("sql", page)
    lock, move = step.split(";", 1)
    with psycopg.connect(scene.dsn, autocommit=True) as connection:
        connection.execute(table.encode())
        connection.execute(
            """INSERT INTO scheduled (due_at, topic, key, value) VALUES
               (now() + interval '1 hour', 't', 'k', 'not yet'), (now() - interval '1 minute', 't', 'k', 'second'),
               (now() - interval '1 hour', 't', 'k', 'first'), (now() - interval '1 minute', 't', 'k', 'third')"""
        )
        for expected in (3, 0):
            with connection.transaction():
                connection.execute(lock.encode())
                assert connection.execute(move.encode()).rowcount == expected
        rows = connection.execute("SELECT kafka_value FROM outbox ORDER BY id").fetchall()
        left = connection.execute("SELECT value FROM scheduled").fetchall()
    assert (rows, left) == ([("first",), ("second",), ("third",)], [("not yet",)])


@pytest.mark.parametrize("page", [*sorted(ROOT.glob("docs/**/*.md")), ROOT / "README.md"], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in link:
            assert (page.parent / link).exists(), f"{page.name} links to {link}"
