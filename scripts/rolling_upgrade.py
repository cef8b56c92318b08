"""`scripts/rolling-upgrade COMMIT [MODE ...]`: runs an older and this version in one group, under load.

Two older harvesters run while four sessions write. A newer one refuses to start until `init` of the newer version has
migrated the tables beneath them; then the older ones are replaced one after the other, the standby first, as
docs/operations.md instructs. Another older one is then refused. Finally the newer leader is killed, and the other one
drains the outbox.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from harvester import stack
from harvester.errors import ExitCode
from harvester.outbox.sql.ddl import schema_version
from scripts.smoke_parts import (
    LOAD,
    Broken,
    Outbox,
    Servers,
    Verdict,
    configuration,
    ended,
    outbox,
    run,
    running,
    until,
    verified,
)

ROOT = Path(__file__).parents[1]
RECORDS = 40_000
MODES = ("at-least-once", "exactly-once")


@dataclass(frozen=True, slots=True)
class Version:
    """One of the two: its programs, and a configuration that it knows."""

    servers: Servers
    config: Path

    def run(self, *arguments: str, ends: int = 0) -> str:
        return run(self.servers, self.config, *arguments, ends=ends)


def older(commit: str, place: Path) -> Path:
    """An interpreter that finds the sources of a commit before those that are installed."""
    source, library = place / "older", place / "library"
    library.mkdir()
    subprocess.run(["git", "-C", ROOT, "worktree", "add", "--detach", "--quiet", source, commit], check=True)
    for name, folder in (("harvester", "harvester"), ("harvester_cli", "cli/harvester_cli")):
        (library / name).symlink_to(source / folder)
    program = place / "python"
    program.write_text(f'#!/bin/sh\nPYTHONPATH={shlex.quote(str(library))} exec {sys.executable} "$@"\n')
    program.chmod(0o755)
    return program


def upgrade(servers: Servers, python: Path, delivery: str) -> Verdict:
    """On a database, a topic and a group of its own; `python` runs the older version."""
    # The default is not named: an older version need not know the option.
    mode = {} if delivery == MODES[0] else {"delivery": delivery}
    with outbox(servers, "upgrade") as made:
        old = Version(replace(servers, python=python), configuration(servers, made.name, control=False, **mode))
        new = Version(servers, configuration(servers, made.name, **mode))
        left = _life(old, new, made, delivery)
        return verified(servers, new.config, made.name, RECORDS, left, delivery)


def _life(old: Version, new: Version, made: Outbox, delivery: str) -> int:
    # How many records were still to come at SIGKILL.
    def relays() -> Callable[[], bool]:
        before = made.gone()
        return lambda: made.gone() > before + 200

    old.run("init", "--notify")
    began = made.schema_version()
    with ExitStack() as all_running:

        def start(version: Version, *command: str) -> subprocess.Popen[bytes]:
            return all_running.enter_context(running(version.servers, version.config, *command or ("start",)))

        first = start(old)
        until(lambda: made.term() > 0, "the older version leads", first)
        second = start(old)
        pump = start(old, "pump", "--topic", made.name, "--records", str(RECORDS), *LOAD)
        until(relays(), "records flow", first, second, pump)
        migrates = began < schema_version()
        if migrates:
            new.run("start", ends=ExitCode.SCHEMA)
        new.run("init", "--notify")
        if made.schema_version() != schema_version():
            raise Broken(f"init left schema version {made.schema_version()}")
        until(relays(), "records flow after init", first, second, pump)
        _stopped(second, "the older one that stood by")
        third = start(new)
        until(relays(), "records flow beside a newer member", first, third, pump)
        led = made.term()
        _stopped(first, "the older leader")
        until(lambda: made.term() > led, "the newer version leads", third)
        if migrates:
            old.run("start", ends=ExitCode.SCHEMA)
        fourth = start(new)
        until(relays(), "records flow in the newer version", third, fourth, pump)
        led, left = made.term(), max(0, RECORDS - made.gone())
        third.kill()
        third.wait()
        until(lambda: made.term() > led, "the last one leads", fourth)
        ended(pump, "the pump")
        until(lambda: not made.rows(), "the outbox is empty", fourth)
        _stopped(fourth, "the last harvester")
    print(f"{delivery}: schema {began} to {made.schema_version()}, {made.term()} terms, {left} to come at SIGKILL")
    return left


def _stopped(process: subprocess.Popen[bytes], what: str) -> None:
    process.send_signal(signal.SIGTERM)
    ended(process, what)


def main() -> int:
    """Both modes, or those that are named."""
    with tempfile.TemporaryDirectory(prefix="upgrade-") as directory:
        place = Path(directory)
        place.chmod(0o755)
        try:
            program = older(sys.argv[1], place)
            info = stack.up(place / "stack", stack.StackOptions(durable=False, kafka_heap_mb=512))
            servers = Servers(info.dsn, info.bootstrap, "", "", Path(sys.executable), place)
            problems = []
            for delivery in sys.argv[2:] or MODES:
                try:
                    found = upgrade(servers, program, delivery)
                except Broken as error:
                    found = Verdict(problem=str(error))
                print(f"{delivery}: {found}", flush=True)
                problems.append(found.problem)
        finally:
            stack.down(place / "stack", delete=True)
            subprocess.run(["git", "-C", ROOT, "worktree", "remove", "--force", place / "older"], check=False)
    print("; ".join(filter(None, problems)) or "holds")
    return 1 if any(problems) else 0


if __name__ == "__main__":
    os.environ.pop("PYTHONPATH", None)
    raise SystemExit(main())
