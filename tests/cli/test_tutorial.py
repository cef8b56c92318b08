"""docs/tutorial.md, followed to the letter, but for the servers, which are those of the tests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cli import cli_environment
from tests.support.servers import Servers
from tests.support.warm import harvester_on_path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^(?:Save this as `(?P<file>[^`]+)`:\n\n)?```(?P<kind>\w*)\n(?P<text>.*?)^```", re.M | re.S)

# Installing goes into the environment that is under test; so do the servers, which are there already.
ELSEWHERE = {
    "python3 -m venv ~/outbox-tutorial/venv": "tests/packaging/test_wheel.py makes an environment",
    "~/outbox-tutorial/venv/bin/pip install '.[stack]'": "tests/packaging/test_wheel.py installs a wheel",
    "cd ~/outbox-tutorial": "the test has a directory of its own",
    "source venv/bin/activate": "the test has this environment",
}


@pytest.fixture
def path() -> Iterator[str]:
    """That of a shell: its `harvester` costs no imports, all else is what is installed here."""
    with harvester_on_path() as folder:
        yield f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"


@pytest.mark.timeout(600)
def test_the_tutorial_works(servers: Servers, empty_database: str, group: str, path: str, tmp_path: Path) -> None:
    names = {"shop": group, "orders": f"orders-{group}", "readers": f"readers-{group}", "billing": f"billing-{group}"}
    environment = cli_environment({"HARVESTER_STACK": str(tmp_path / "stack"), "PATH": path})
    output, started, pending = "", f"--dsn '{empty_database}' --bootstrap {servers.bootstrap}", ""
    exports = ""  # what `eval` has put into the reader's shell
    for found in BLOCK.finditer(PAGE):
        text = found["text"]
        for name, ours in names.items():
            text = re.sub(rf"(['\" ]){name}(?=['\"]| --format| --topic| --offset)", rf"\g<1>{ours}", text)
        if found["kind"] == "console":
            for command in re.findall(r"^\$ (.*)$", text, re.M):
                if command in ELSEWHERE:
                    continue
                given = command
                if given == "harvester stack up":
                    given += f" {started}"
                elif given.startswith("harvester consume"):
                    given += f" --coordination-topic marshal-{group} --heartbeat-interval 1s --timeout 60"
                elif given.startswith("harvester claims"):
                    given += f" --coordination-topic marshal-{group} --heartbeat-interval 1s"
                elif given.startswith("eval"):
                    exports = f"{given}\n"
                done = subprocess.run(
                    ["bash", "-c", f"{exports}{given}"], cwd=tmp_path, env=environment, capture_output=True,
                    text=True, timeout=150, check=False,
                )  # fmt: skip
                # The doctor finds what is wrong with the servers of the tests.
                assert done.returncode in ({0, 1} if command == "harvester doctor" else {0}), (
                    f"{command}\n{done.stdout}{done.stderr}"
                )
                assert "Traceback" not in done.stderr, done.stderr
                pending = done.stdout
                output += f"$ {command}\n{done.stdout}"
        elif found["kind"] in ("toml", "python"):
            file = found["file"] or "broken.py"
            ours = f'topics=["orders-{group}"], coordination_topic="marshal-{group}", heartbeat_interval_s=1'
            (tmp_path / file).write_text(text.replace(f'topics=["orders-{group}"]', ours))
        else:
            # A transcript: what the command before it has printed, in any order of the keys.
            assert sorted(pending.splitlines()) == sorted(text.splitlines())
            assert pending.index("ann bought number 1") < pending.index("ann bought number 3")
    assert "no purchase: the card was refused" in output
    assert "3 records, the first for" in output
    assert "leader      none yet" in output
    assert output.count("3 invoices") == 2
    assert re.search(r"warning  topics.missing|problem  topics.missing", output)
    assert "1 record discarded" in output


@pytest.mark.parametrize("command", sorted(ELSEWHERE))
def test_what_is_not_run_stands_in_the_page(command: str) -> None:
    assert f"$ {command}\n" in PAGE
