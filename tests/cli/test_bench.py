"""`scripts/bench` with tiny numbers: every scenario runs against the real servers and names its figures as promised."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Collection, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO

import pytest
from confluent_kafka import Producer

from scripts.benchmarks import _relay, _report, _worker, consumer, coordination, drain, latency, limits
from scripts.benchmarks.__main__ import BOOTSTRAP, DSN, find, main
from scripts.benchmarks._backlog import read
from scripts.benchmarks._place import Place
from scripts.benchmarks._relay import FULL
from scripts.benchmarks._scenario import Bench, Samples
from tests.conftest import MakeTopic
from tests.support.longs import VARIABLE, long
from tests.support.servers import Servers
from tests.support.warm import Forked, PipedModule, start_aside

ONE_DRAIN = {"rate_per_s", "cpu_us_per_record", "cpu_us_supervisor", "rss_mb"}
SHARE = {"first_per_s", "last_per_s", "last_over_first", "first_over_drain", "first_over_drains_first"}
FLAT = {"pss_last_over_first", "files_last_over_first", "sessions_last_over_first"}
FORGOTTEN = {"burst_s.ratio", "p50_ms.ratio", "idle_cpu_percent.beside", "idle_server_cpu_percent.alone"}
WAYS: Collection[str] = consumer.WAYS if VARIABLE in os.environ else ("run", "run_batches")  # each is a dozen processes
GROUPS: dict[str, dict[str, set[str]]] = {
    "rates": {
        "limits": {"mark_delete_per_s", "read_delete_per_s", "produce_per_s", "together.produce_per_s"},
        "drain": {*ONE_DRAIN, "limit_per_s", "ratio", "limit_per_s_by_batch.500_copy"},
        "supervisor": {"per_core_per_s", "one_key.cpu_us_per_record"},
    },
    "once": {"exactly-once": {"rate_per_s", "ratio", "hot_key_per_s", "p50_ms", "p99_ms"}},
    "consumers": {
        "coordination": {
            *(f"{mode}_{what}" for mode in ("alo", "amo") for what in ("ratio", "per_s")),
            "bare_per_s",
            "messages_per_partition_minute",
            "recovery_s",
        },
        "poison": {"ratio", "with_per_s"},
        "claims": {"10.records", "10.bytes", "10.cpu_s"},
        "consumer": {f"{way}.ratio" for way in WAYS} | {"workers.factor"},
    },
    "variations": {
        "shards": {"rate_per_s.1", "slowest_over_best"},
        "keys": {"rate_per_s.zipf", "exactly_once.rate_per_s.zipf"},
        "size": {"rate_per_s.10000"},
    },
    "waits": {
        "latency": {"p50_ms.100", "p99_ms.100", "p999_ms.100", "max_ms.100"},
        "idle": {"statements_per_s", "cpu_percent", "wakeups_per_s", "first_record_ms"},
        "writers": {"insert_ratio"},
        "stasher": {"leased_over_plain", "together.leased_over_plain", "batch.leased_over_plain"},
    },
    "backlogs": {
        "growth": {*SHARE, "steady.p99_ms"},
        "held": SHARE,
    },
    "keys": {
        "cold": {"cold_over_whole"},
        "hot-key": {"rate_per_s", "limit_per_s", "round_trip_ms"},
        "stuck": {"others_ratio"},
        "start": {"first_record_s", "shard_back_s", "pss_mb"},
        "gaps": FORGOTTEN,
        "dead-head": FORGOTTEN,
        "soak": {f"{phase}.{name}" for phase in ("backlog", "steady") for name in FLAT},
    },
}
# Scenarios of several phases, and variations of others; those try the same machinery in half of the time.
NIGHTLY = {"backlogs", "consumers", "keys", "once", "variations"}


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, servers: Servers) -> None:
    """The shared servers, and one variant of each kind."""
    monkeypatch.setenv(DSN, servers.dsn)
    monkeypatch.setenv(BOOTSTRAP, servers.bootstrap)
    monkeypatch.setattr(limits, "BATCHES", (500,))
    monkeypatch.setattr(drain, "VARIANTS", {"cap_10000": FULL})
    monkeypatch.setattr(drain, "KEYS", {"zipf": (1.0, 10, 1.0)})
    monkeypatch.setattr(drain, "SIZES", (10_000,))
    monkeypatch.setattr(latency, "RATES", (100,))
    monkeypatch.setattr(latency, "TRIGGER", (True,))
    monkeypatch.setattr(coordination, "INTERVAL_S", 1.0)
    monkeypatch.setattr(coordination, "HELD", (10,))
    if VARIABLE not in os.environ:  # nightly its processes are new ones, and there are more of them
        monkeypatch.setattr(_worker, "subprocess", SimpleNamespace(Popen=_worker_process, PIPE=subprocess.PIPE))
        forked = SimpleNamespace(Popen=_harvester, DEVNULL=None, TimeoutExpired=subprocess.TimeoutExpired)
        monkeypatch.setattr(_relay, "subprocess", forked)
        monkeypatch.setattr(consumer, "WAYS", {way: consumer.WAYS[way] for way in WAYS})
        for module in (consumer, coordination):
            monkeypatch.setattr(module, "PARTITIONS", 2)  # as many processes begin at once


def _worker_process(command: Sequence[str], **_pipes: Any) -> PipedModule:
    return PipedModule(*command[2:])


def _harvester(command: Sequence[str], *, stderr: TextIO, cwd: Path, **_aside: Any) -> Forked:
    return start_aside(command[3:], stderr.fileno(), cwd)


@pytest.mark.parametrize("group", [pytest.param(name, marks=long if name in NIGHTLY else ()) for name in GROUPS])
def test_each_scenario_gives_its_figures(
    group: str, tiny: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    small = ["--records", "200", "--rounds", "1", "--seconds", "0.3", "--minutes", "0.01", "--cold"]
    code = main([*GROUPS[group], *small, "--shards", "1", "--set", "limits.mark_backoff=5ms", "--json", str(file)])
    printed, progress = capsys.readouterr()
    assert code == 0, progress
    found = [json.loads(line) for line in printed.splitlines()]
    assert [line["scenario"] for line in found] == list(GROUPS[group])
    assert [json.loads(line) for line in file.read_text().splitlines()] == found
    for line in found:
        names = flat(line["figures"])
        assert GROUPS[group][line["scenario"]] - names.keys() == set()
        assert {name for name, value in names.items() if value < 0} == set()
        assert line["rounds"] == 1
        assert line["settings"]["set"] == ["limits.mark_backoff=5ms"]
        assert line["versions"].keys() >= {"harvester", "postgresql", "kafka", "librdkafka"}


def test_the_groups_are_all_scenarios_of_our_own() -> None:
    """A scenario that is added has to be tried here, too; those that take other software or long are not."""
    tried = {name for group in GROUPS.values() for name in group}
    assert find().keys() - tried == {"resume", "peers", "consumer-peers", "pipeline", "pipeline-growth", "audit"}


def test_repeats_of_a_peer_are_counted_and_end_nothing(servers: Servers, make_topic: MakeTopic) -> None:
    topic = make_topic(partitions=1)
    place = Place(topic, servers.dsn, servers.bootstrap, Path(), servers.dsn)
    producer = Producer({"bootstrap.servers": servers.bootstrap})

    def publish(*numbers: int) -> None:
        for number in numbers:
            producer.produce(topic, key=f"k-{number % 2}", value=f"{number}:", timestamp=1_000 + number)
        assert producer.flush(30) == 0

    publish(1, 2, 3, 2, 3, 4)
    log = read(place, 4, may_repeat=True)
    assert (len(log.appended_ms), log.repeats) == (4, 2)
    with pytest.raises(SystemExit, match="6 records of 4, 2 repeated or out of order"):
        read(place, 4)
    with pytest.raises(SystemExit, match="could not be read to its end"):  # one is lost, and that is not forgiven
        read(place, 5, may_repeat=True, timeout_s=0.5)
    publish(6, 5, 8, 7)
    publish(10, 9, 11, 1)
    assert read(place, 11, may_repeat=True).repeats == 3
    publish(14, 12)  # one key's, in the wrong order for the first time
    with pytest.raises(SystemExit, match="13 records of 13, 1 repeated or out of order"):
        read(place, 13, may_repeat=True)


def test_figures_are_medians_of_the_rounds() -> None:
    samples = Samples()
    for value in (1.0, 30.0, 2.0):
        samples.add("rate_per_s.8", value)
    samples.add("ratio", 0.123456)
    bench = Bench(dsn="host=127.0.0.1 port=1", bootstrap="", place=Path(), records=1, rounds=3)
    line = _report.line("made up", bench, samples)
    assert line["figures"] == {"rate_per_s": {"8": 2.0}, "ratio": 0.1235}
    assert samples.rows()[0] == ("rate_per_s.8", 2.0, 1.0, 30.0, 3)


def test_a_run_that_was_wrong_has_no_figures(
    tiny: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(limits, "overall", lambda progress, expected: _refuse(expected))
    assert main(["limits", "--records", "50", "--rounds", "1", "--cold"]) == 1
    printed, progress = capsys.readouterr()
    assert printed == ""
    assert "limits failed: 50 rows are missing" in progress


def _refuse(expected: int) -> float:
    raise SystemExit(f"{expected} rows are missing")


def flat(figures: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """The figures under dotted names."""
    found: dict[str, float] = {}
    for name, value in figures.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return found
