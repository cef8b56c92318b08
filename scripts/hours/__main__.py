"""The command: which hours, their minutes, and whether anything was lost."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from harvester import stack
from harvester.stack import StackInfo
from scripts.smoke_parts import Broken

from . import kubernetes, laptop, vm
from .steps import Failed, Hour, is_good, wheel_house

KINDS = ("laptop", "vm", "kubernetes")
_OF_ROOT = {"vm": vm.unusable, "kubernetes": kubernetes.unusable}


def unusable(kind: str) -> str:
    """Why this machine cannot play it; empty if it can."""
    if kind not in _OF_ROOT:
        return ""
    return "only root may make namespaces" if os.geteuid() != 0 else _OF_ROOT[kind]()


@contextmanager
def _servers(place: Path) -> Iterator[StackInfo]:
    """Those of a platform: there before the hour begins."""
    info = stack.up(place, stack.StackOptions(durable=False, kafka_heap_mb=512))
    try:
        yield info
    finally:
        stack.down(place, delete=True)


def play(kind: str, scratch: Path, wheels: Path, *, warm: bool) -> tuple[Hour, dict[str, int]]:
    """One hour; its steps, and what `verify` found."""
    place = scratch / kind
    place.mkdir()
    hour = Hour(kind, place)
    if kind == "laptop":
        return hour, laptop.play(hour, wheels, warm=warm)
    with _servers(scratch / f"{kind}-servers") as servers:
        return hour, vm.play(hour, wheels, servers) if kind == "vm" else kubernetes.play(hour, servers)


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when every step went well, and nothing was lost, repeated or out of order."""
    parser = argparse.ArgumentParser(prog="scripts/first-hour", description="Play the first hour of each kind of user.")
    parser.add_argument("kinds", nargs="*", choices=[*KINDS, []], default=[], help="which hours [all]")
    parser.add_argument("--warm", action="store_true", help="on the laptop, use the jars that are in the cache already")
    given = parser.parse_args(arguments)
    kinds = given.kinds or KINDS
    for kind in kinds:
        if why := unusable(kind):
            print(f"first-hour: {kind}: {why}", file=sys.stderr)
            return 1
    played = {}
    with tempfile.TemporaryDirectory(prefix="harvester-first-hour-") as name:
        scratch = Path(name)
        scratch.chmod(0o755)  # started by root, PostgreSQL and the containers run under other accounts
        try:
            (scratch / "house").mkdir()
            wheels = wheel_house(scratch / "house") if set(kinds) - {"kubernetes"} else scratch
            for kind in kinds:
                hour, found = play(kind, scratch, wheels, warm=given.warm)
                print(f"{kind}: {hour.minutes:.1f} minutes; {found['inserted']:,} records, lost {found['lost']}",
                      file=sys.stderr)  # fmt: skip
                steps = {step: round(seconds, 1) for step, seconds in hour.steps.items()}
                played[kind] = {"minutes": round(hour.minutes, 2), "steps_s": steps, **found, "good": is_good(found)}
        except (Failed, Broken, subprocess.SubprocessError) as failure:
            print(f"first-hour: {kind}: {failure}", file=sys.stderr)
            return 1
    print(json.dumps(played))
    return 0 if all(each["good"] for each in played.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
