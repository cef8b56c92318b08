"""`scripts/faults`: a random campaign of faults against harvesters under load, on servers of its own.

Prints each fault with its time, then what was written, delivered and repeated, and as its last line `held`, or
`broken: …` with the first broken invariant. The exit code is 0 or 1 accordingly. The same seed plans the same faults.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from .load import Pace
from .run import Campaign, Outcome, run
from .schedule import KINDS


def main() -> None:
    """Run it."""
    options = _options()
    with tempfile.TemporaryDirectory(prefix="harvester-faults-") as place:
        directory = Path(place)
        directory.chmod(0o755)  # started by root, PostgreSQL runs under another account
        campaign = Campaign(
            seed=options.seed,
            seconds=options.minutes * 60,
            harvesters=options.harvesters,
            shards=options.shards,
            marking=options.marking,
            pace=Pace(rate_per_s=options.rate, keys=options.keys),
            kinds=frozenset(options.only or KINDS) - frozenset(options.without or ()),
            gap_s=options.gap,
            limits={"max_in_flight_records": options.cap, **dict(each.split("=", 1) for each in options.set)},
        )
        progress = sys.stderr if options.json else sys.stdout
        outcome = run(campaign, directory, lambda text: print(text, file=progress, flush=True))
        if options.logs:
            _keep_logs(outcome, options.logs)
    if options.json:
        print(json.dumps({"seed": options.seed, **outcome.summary()}))
    else:
        for name, value in outcome.summary().items():
            print(f"{name}: {', '.join(f'{k} {v}' for k, v in value.items()) if isinstance(value, dict) else value}")
    print(outcome.judgement.sentence)
    sys.exit(0 if outcome.judgement.held else 1)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/faults", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--harvesters", type=int, default=3)
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--rate", type=float, default=600.0, help="records per second")
    parser.add_argument("--keys", type=int, default=200)
    parser.add_argument("--cap", type=int, default=1000, help="limits.max_in_flight_records")
    parser.add_argument("--gap", type=float, default=4.0, help="mean seconds from one fault's end to the next")
    parser.add_argument("--set", action="append", default=[], metavar="LIMIT=VALUE", help="as under [limits]")
    parser.add_argument("--marking", choices=("memory", "table"), help="default: the harvester's own")
    parser.add_argument("--only", action="append", choices=sorted(KINDS), help="kinds of faults (default: all)")
    parser.add_argument("--without", action="append", choices=sorted(KINDS), help="kinds of faults to leave out")
    parser.add_argument("--logs", type=Path, help="keep the harvesters' logs in this directory")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def _keep_logs(outcome: Outcome, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for process, text in outcome.logs.items():
        (target / f"{process}.log").write_text(text)


if __name__ == "__main__":
    main()
