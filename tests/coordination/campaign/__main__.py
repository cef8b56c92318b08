"""`scripts/coordination-faults`: consumers that coordinate through Kafka alone, while faults strike them.

Prints each fault with its time, then what was processed and how soon all was well again, and as its last line `held`,
or `broken: …` with the first promise that was not kept. The exit code is 0 or 1 accordingly. The same seed plans the
same faults.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.support.campaigns import end, keep_logs

from .run import Campaign, run
from .schedule import KINDS


def main() -> None:
    """Run it."""
    options = _options()
    with tempfile.TemporaryDirectory(prefix="harvester-coordination-") as place:
        directory = Path(place)
        directory.chmod(0o755)  # started by root, servers run under another account
        campaign = Campaign(
            seed=options.seed,
            seconds=options.minutes * 60,
            at_most_once=options.amo,
            interval_s=options.interval,
            consumers=options.consumers,
            partitions=options.partitions,
            records=options.records,
            batch_records=options.batch,
            kinds=frozenset(options.only or KINDS) - frozenset(options.without or ()),
            settings={} if options.shed_at_once is None else {"shed_at_once": options.shed_at_once},
        )
        progress = sys.stderr if options.json else sys.stdout
        print(
            f"{campaign.consumers} consumers, {campaign.partitions} partitions, {campaign.records} records,"
            f" {'at most once' if campaign.at_most_once else 'at least once'}, interval {options.interval:g} s,"
            f" seed {campaign.seed}; faults for {campaign.seconds:g} s",
            file=progress,
        )
        outcome = run(campaign, directory, None, lambda text: print(text, file=progress, flush=True))
        keep_logs(outcome, options.logs)
    end(outcome, options.seed, as_json=options.json)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/coordination-faults", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--amo", action="store_true", help="at most once (default: at least once)")
    parser.add_argument("--interval", type=float, default=1.0, help="HeartbeatInterval in seconds")
    parser.add_argument("--consumers", type=int, default=8)
    parser.add_argument("--partitions", type=int, default=32)
    parser.add_argument("--records", type=int, default=20_000, help="evenly over the time")
    parser.add_argument("--batch", type=int, default=20, help="records that are claimed at once, at most once")
    parser.add_argument("--shed-at-once", type=int, help="the most that are given up in an interval (default: all)")
    parser.add_argument("--only", action="append", choices=sorted(KINDS), help="kinds of faults (default: all)")
    parser.add_argument("--without", action="append", choices=sorted(KINDS), help="kinds of faults to leave out")
    parser.add_argument("--logs", type=Path, help="keep the consumers' logs in this directory")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
