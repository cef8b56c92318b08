"""Drain a backlog with the real command line, with different numbers of shards in turn, and compare.

Each round makes a database and a topic of its own, fills the outbox (`harvester pump`), drains it
(`harvester start --until-empty`), and judges (`harvester verify`). The rate is what `verify` says: records per second
from the first record in Kafka to the last, so start-up and election are not in it. Rounds alternate between the
numbers of shards, because machines drift; the table shows medians with minimum and maximum, and the ratio of each
number of shards to the first.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import psycopg
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from rich.console import Console
from rich.table import Table

from harvester.stack import StackOptions, down, up


def main() -> None:
    """Run it; the last line is JSON."""
    options = _options()
    with tempfile.TemporaryDirectory(prefix="harvester-bench-") as place:
        info = up(Path(place) / "stack", StackOptions())
        try:
            rates: dict[int, list[float]] = {shards: [] for shards in options.shards}
            for number in range(options.rounds):
                for shards in options.shards:
                    rates[shards].append(_round(options, shards, info.dsn, info.bootstrap, Path(place)))
                    print(f"round {number + 1}: {shards} shards: {rates[shards][-1]:,.0f} records/s", file=sys.stderr)
        finally:
            down(Path(place) / "stack", delete=True)
    _report(options, rates)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__)
    parser.add_argument("--records", type=int, default=100_000)
    parser.add_argument("--keys", type=int, default=1_000)
    parser.add_argument("--size", type=int, default=200, help="bytes of a value")
    parser.add_argument("--shards", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], metavar="SETTING=VALUE", help="as of `harvester start`")
    return parser.parse_args()


def _round(options: argparse.Namespace, shards: int, dsn: str, bootstrap: str, place: Path) -> float:
    name = f"bench_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    config = place / f"{name}.toml"
    config.write_text(
        f'data_source = "{dsn.rsplit("/", 1)[0]}/{name}"\nleader_group_id = "{name}"\n'
        f'[base_kafka_config]\n"bootstrap.servers" = "{bootstrap}"\n'
    )
    admin = AdminClient({"bootstrap.servers": bootstrap})
    topic = NewTopic(name, 4, 1, config={"message.timestamp.type": "LogAppendTime"})
    admin.create_topics([topic])[name].result(30)
    settings = [part for setting in options.set for part in ("--set", setting)]
    _harvester("init", "-f", str(config))
    _harvester(
        "pump", "-f", str(config), "--topic", name, "--records", str(options.records), "--keys", str(options.keys),
        "--size", str(options.size), "--rows-per-transaction", "100", "--headers", "1", "--json",
    )  # fmt: skip
    _harvester("start", "-f", str(config), "--shards", str(shards), "--until-empty", "--dashboard", "off", *settings)
    verdict = json.loads(_harvester("verify", "-f", str(config), "--topic", name, "--json").splitlines()[-1])
    if verdict["lost"] or verdict["order_violations"] or verdict["duplicates"]:
        raise SystemExit(f"the drain was wrong: {verdict}")
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")
    return float(verdict["rate_per_s"])


def _harvester(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "harvester_cli", *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"harvester {' '.join(arguments)}: exit code {done.returncode}\n{done.stderr}")
    return done.stdout


def _report(options: argparse.Namespace, rates: dict[int, list[float]]) -> None:
    table = Table(title=f"drain of {options.records:,} records, {options.keys:,} keys, {options.size} bytes")
    for column in ("shards", "median records/s", "min", "max", f"÷ {options.shards[0]} shards"):
        table.add_column(column, justify="right")
    medians = {shards: statistics.median(found) for shards, found in rates.items()}
    first = medians[options.shards[0]]
    for shards, found in rates.items():
        figures = (medians[shards], min(found), max(found))
        table.add_row(str(shards), *(f"{figure:,.0f}" for figure in figures), f"{medians[shards] / first:.2f}")
    Console(stderr=True).print(table)
    print(json.dumps({"scenario": "shards", "settings": options.set, "figures": {"rate_per_s": medians}}))


if __name__ == "__main__":
    main()
