"""`scripts/bench`: runs scenarios on servers of its own (or on given ones), one after the other."""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from scripts.benchmarks import _report
from scripts.benchmarks._place import drop_templates
from scripts.benchmarks._relay import warm
from scripts.benchmarks._scenario import Bench, Samples, Scenario

DSN = "HARVESTER_TEST_DSN"
BOOTSTRAP = "HARVESTER_TEST_BOOTSTRAP"


def find() -> dict[str, Scenario]:
    """All scenarios by name, as the modules of this directory offer them."""
    found: dict[str, Scenario] = {}
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if not module.name.startswith("_"):
            found |= getattr(importlib.import_module(f"scripts.benchmarks.{module.name}"), "SCENARIOS", {})
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when all scenarios came to figures, else 1."""
    scenarios = find()
    options = _options(scenarios, arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers and harvesters are stopped on the way out
    names = options.scenario or [name for name, scenario in scenarios.items() if not scenario.chosen]
    own = all(scenarios[name].own_servers for name in names)
    failed = 0
    lines = []
    with _bench(options, servers=not own) as bench:
        if not own and not options.cold:
            warm(bench)
        for name in names:
            samples = Samples()
            bench.say(f"== {name}")
            try:
                scenarios[name].run(bench, samples)
            except (Exception, SystemExit) as error:
                if isinstance(error, SystemExit) and isinstance(error.code, int):
                    raise
                if not isinstance(error, SystemExit):
                    traceback.print_exc()
                bench.say(f"{name} failed: {error}")
                failed += 1
                continue
            _report.show(name, scenarios[name].about, bench, samples)
            lines.append(_report.dumps(_report.line(name, bench, samples)))
            print(lines[-1], flush=True)
            if options.json:
                options.json.write_text("".join(f"{text}\n" for text in lines))
    return 1 if failed else 0


def _options(scenarios: dict[str, Scenario], arguments: Sequence[str] | None) -> argparse.Namespace:
    about = "".join(
        f"  {name:<9} {scenario.about}{' (only when named)' if scenario.chosen else ''}\n"
        for name, scenario in scenarios.items()
    )
    parser = argparse.ArgumentParser(
        prog="scripts/bench",
        description="Measure the harvester and what limits it, side by side. Scenarios:\n\n" + about,
        epilog="Without names: all that are not marked. docs/performance.md explains the figures.\n"
        f"{DSN} and {BOOTSTRAP} name servers of your own.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("scenario", nargs="*", metavar="SCENARIO")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the lines of JSON here, too")
    parser.add_argument("--rounds", type=_positive, default=3)
    parser.add_argument("--records", type=_positive, default=100_000, help="of an ordinary backlog (100,000)")
    parser.add_argument("--shards", type=_positive, nargs="+", default=[], help="numbers to compare, or the one to use")
    parser.add_argument("--set", action="append", default=[], metavar="SETTING=VALUE", help="as of `harvester start`")
    parser.add_argument("--seconds", type=float, help="length of each phase that is a time (default: each its own)")
    parser.add_argument("--minutes", type=float, help="length of long runs: growth's steady part (5), soak (30)")
    parser.add_argument("--cold", action="store_true", help="do not warm the servers up first")
    options = parser.parse_args(arguments)
    # `--shards 2 8 drain` would take drain for a number; `drain --shards 2 8` does not, so say which it is.
    unknown = [name for name in options.scenario if name not in scenarios]
    if unknown:
        parser.error(f"no scenario {', '.join(unknown)}: choose from {', '.join(scenarios)}")
    return options


def _positive(text: str) -> int:
    number = int(text.replace(",", "").replace("_", ""))
    if number < 1:
        raise argparse.ArgumentTypeError("1 or more")
    return number


@contextmanager
def _bench(options: argparse.Namespace, *, servers: bool) -> Iterator[Bench]:
    from harvester.stack import StackOptions, down, up

    with tempfile.TemporaryDirectory(prefix="harvester-bench-") as place:
        Path(place).chmod(0o755)  # started by root, PostgreSQL runs under another account
        bench = Bench(
            dsn="",
            bootstrap="",
            place=Path(place),
            records=options.records,
            rounds=options.rounds,
            shards=tuple(options.shards),
            settings=tuple(options.set),
            seconds=options.seconds,
            minutes=options.minutes,
        )
        if not servers:
            yield bench
            return
        given = StackOptions(dsn=os.environ.get(DSN) or None, bootstrap=os.environ.get(BOOTSTRAP) or None)
        try:
            info = up(Path(place) / "stack", given, progress=bench.say)
            bench = replace(bench, dsn=info.dsn, bootstrap=info.bootstrap)
            try:
                yield bench
            finally:
                if given.dsn is not None:
                    drop_templates(bench)
        finally:
            down(Path(place) / "stack", delete=True)


if __name__ == "__main__":
    sys.exit(main())
