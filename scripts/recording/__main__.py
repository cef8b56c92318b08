"""`scripts/record`: plays, checks and saves the session. Shows a screen that is not as expected, and exits with 1."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import time
from pathlib import Path

from rich.text import Text

from harvester.errors import HarvesterError

from ._picture import save
from ._place import prepared
from ._story import Story
from ._tmux import WIDTH, Tmux, Unseen

PICTURES = ("dashboard", "watch")  # those that the documentation shows


def main() -> int:
    """Plays the session once."""
    options = _options()
    if shutil.which("tmux") is None:
        return _fail("there is no tmux\nhint: scripts/tmux installs it where it can")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that what was made is removed
    for folder in filter(None, (options.out, options.pictures)):
        folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    count = 0

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {text}", file=sys.stderr, flush=True)

    def keep(name: str, title: str, screen: Text) -> None:
        nonlocal count
        count += 1
        save(screen, options.out, f"{count:02}-{name}", title, WIDTH)
        if options.pictures is not None and name in PICTURES:
            shutil.copyfile(options.out / f"{count:02}-{name}.svg", options.pictures / f"{name}.svg")
        say(f"seen: {name}")

    try:
        with prepared(options.dsn, options.bootstrap, say) as place:
            sockets = place.folder / "sockets"
            sockets.mkdir(mode=0o700)
            environment = {"HARVESTER_CONFIG": str(place.config), "RUNTIME_DIRECTORY": str(sockets)}
            tmux = Tmux(place.folder, environment, options.within)
            try:
                Story(tmux, place, keep).play()
            finally:
                tmux.close()
    except (Unseen, HarvesterError) as error:
        return _fail(str(error))
    say(f"{count} screens are in {options.out}")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/record", description="Play a session on a terminal and check it.")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the screens go, as text and SVG")
    parser.add_argument(
        "--pictures", type=Path, metavar="DIR", help="where those that the documentation shows go: docs/images"
    )
    parser.add_argument(
        "--dsn",
        default=os.environ.get("HARVESTER_TEST_DSN") or None,
        help="a PostgreSQL of your own (default: $HARVESTER_TEST_DSN, else one is started)",
    )
    parser.add_argument(
        "--bootstrap",
        default=os.environ.get("HARVESTER_TEST_BOOTSTRAP") or None,
        help="Kafka brokers of your own (default: $HARVESTER_TEST_BOOTSTRAP, else one is started)",
    )
    parser.add_argument(
        "--within", type=float, default=120.0, metavar="SECONDS", help="how long each screen may take (default: 120)"
    )
    return parser.parse_args()


def _fail(text: str) -> int:
    print(f"record: {text}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
