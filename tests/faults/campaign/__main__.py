"""`scripts/faults`: a random campaign of faults against harvesters under load, on servers of its own.

Prints each fault with its time, then what was written, delivered and repeated, and as its last line `held`, or
`broken: …` with the first broken invariant. The exit code is 0 or 1 accordingly. The same seed plans the same faults.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.support.campaigns import end, keep_logs

from .load import Pace
from .run import Campaign, run
from .schedule import KINDS, kinds_of
from .setup import AT_LEAST_ONCE, DELIVERIES


def main() -> None:
    """Run it."""
    options = _options()
    with tempfile.TemporaryDirectory(prefix="harvester-faults-") as place:
        directory = Path(place)
        directory.chmod(0o755)  # started by root, PostgreSQL runs under another account
        campaign = Campaign(
            seed=options.seed,
            seconds=options.minutes * 60,
            delivery=options.delivery,
            harvesters=options.harvesters,
            shards=options.shards,
            marking=options.marking,
            pace=Pace(rate_per_s=options.rate, keys=options.keys),
            kinds=frozenset(options.only or kinds_of(options.delivery)) - frozenset(options.without or ()),
            gap_s=options.gap,
            limits={"max_in_flight_records": options.cap, **dict(each.split("=", 1) for each in options.set)},
        )
        progress = sys.stderr if options.json else sys.stdout
        outcome = run(campaign, directory, lambda text: print(text, file=progress, flush=True))
        keep_logs(outcome, options.logs)
    end(outcome, options.seed, as_json=options.json)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/faults", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--delivery", choices=DELIVERIES, default=AT_LEAST_ONCE, help="both: some in the one mode each")
    parser.add_argument("--harvesters", type=int, default=3)
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--rate", type=float, default=600.0, help="records per second")
    parser.add_argument("--keys", type=int, default=200)
    parser.add_argument("--cap", type=int, default=1000, help="limits.max_in_flight_records")
    parser.add_argument("--gap", type=float, default=4.0, help="mean seconds from one fault's end to the next")
    parser.add_argument("--set", action="append", default=[], metavar="LIMIT=VALUE", help="as under [limits]")
    parser.add_argument("--marking", choices=("memory", "table"), help="default: the harvester's own")
    parser.add_argument("--only", action="append", choices=sorted(KINDS), help="kinds of faults (default: by mode)")
    parser.add_argument("--without", action="append", choices=sorted(KINDS), help="kinds of faults to leave out")
    parser.add_argument("--logs", type=Path, help="keep the harvesters' logs in this directory")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
