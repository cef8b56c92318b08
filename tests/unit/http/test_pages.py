"""What Prometheus is told: names and units as it wants them, and nothing that is not known."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from importlib.metadata import version

import pytest
from prometheus_client.parser import text_string_to_metric_families

from harvester.http.pages import Pages, expose
from harvester.http.server import Request, Router
from harvester.status import Backlog, State, Status
from harvester.telemetry.latency import Histogram
from harvester.telemetry.metrics import Totals
from tests.support.statuses import leading

LATENCY = Histogram()
LATENCY.add_all([800.0, 4_000.0, 4_100.0, 70_000.0, 400_000_000.0])
TOTALS = Totals(
    latency=LATENCY,
    quarantined=3,
    repeats_suspected=2,
    acquired=4,
    remarks=5,
    fenced=6,
    troubles={"database": 7, "kafka": 8},
    troubled=frozenset({"kafka"}),
)
BUSY = replace(leading(2), backlog=Backlog(records=10_000, capped=True, oldest_age_s=3.25, quarantine=9))
_UNITS = "records|keys|seconds|ratio|records_per_second|bytes"
_BARE = {"info", "state", "leader", "term", "acquired", "remarks", "fenced", "backlog_capped", "repeats_suspected"} | {
    "shards", "shard_ready", "shard_retries", "shard_errors", "shard_restarts", "trouble", "troubles"
}  # fmt: skip


class Shown:
    """A harvester as pages see it."""

    def __init__(self, status: Status = BUSY, *, working: bool = True, unready: str | None = None) -> None:
        self._status, self._working, self._unready = status, working, unready

    def unready(self) -> str | None:
        return self._unready

    def status(self) -> Status:
        return self._status

    def totals(self) -> Totals:
        return TOTALS

    def is_working(self) -> bool:
        return self._working


@dataclass(frozen=True)
class Got:
    code: int
    body: bytes


def get(path: str, shown: Shown) -> Got:
    response = Router(Pages(shown).routes()).answer(Request("GET", path))
    assert isinstance(response.body, bytes)
    return Got(response.code, response.body)


def samples(status: Status = BUSY) -> dict[str, float]:
    """`name{label=value}` → value."""
    found = {}
    for family in text_string_to_metric_families(expose(status, TOTALS).decode()):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sample.labels.items())
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def test_names_follow_the_rules_of_prometheus() -> None:
    families = [
        family
        for family in text_string_to_metric_families(expose(BUSY, TOTALS).decode())
        if not family.name.startswith("process_")
    ]
    assert len(families) > 30
    for family in families:
        assert re.fullmatch(r"harvester_[a-z_]+", family.name)
        bare = family.name.removeprefix("harvester_")
        assert bare in _BARE or re.search(f"_({_UNITS})$", family.name), family.name
        assert family.documentation.endswith("."), family.name
        for sample in family.samples:
            assert (family.type == "counter") == sample.name.endswith("_total"), sample.name


def test_the_figures_of_a_leader() -> None:
    found = samples()
    expected = {
        "harvester_leader": 1,
        "harvester_term": 7,
        "harvester_state{state=leading}": 1,
        "harvester_state{state=standby}": 0,
        "harvester_backlog_records": 10_000,
        "harvester_backlog_capped": 1,
        "harvester_backlog_oldest_age_seconds": 3.25,
        "harvester_quarantine_records": 9,
        "harvester_in_flight_records": 812,
        "harvester_in_flight_limit_records": 1_000,
        "harvester_queued_records": 4_000,
        "harvester_settled_records_total": 1_234_570,  # the quarantined ones included
        "harvester_quarantined_records_total": 3,
        "harvester_repeats_suspected_total": 2,
        "harvester_acquired_total": 4,
        "harvester_remarks_total": 5,
        "harvester_fenced_total": 6,
        "harvester_shards": 2,
        "harvester_shard_ready{shard=1}": 1,
        "harvester_shard_retries_total{shard=1}": 2,
        "harvester_shard_stored_records_total{shard=1}": 4,
        "harvester_shard_restarts_total{shard=0}": 0,
        "harvester_trouble{source=kafka}": 1,
        "harvester_trouble{source=database}": 0,
        "harvester_troubles_total{source=database}": 7,
        "harvester_troubles_total{source=kafka}": 8,
        "harvester_troubles_total{source=archive}": 0,
        "harvester_latency_seconds_bucket{le=0.001}": 1,
        "harvester_latency_seconds_bucket{le=0.005}": 3,
        "harvester_latency_seconds_bucket{le=300.0}": 4,
        "harvester_latency_seconds_bucket{le=+Inf}": 5,
        "harvester_latency_seconds_count": 5,
    }
    assert {name: found.get(name) for name in expected} == expected
    assert found["harvester_latency_seconds_sum"] == pytest.approx(400.0789, rel=0.02)
    assert found["process_resident_memory_bytes"] > 1_000_000


def test_who_it_is_has_the_version() -> None:
    (info,) = (name for name in samples() if name.startswith("harvester_info"))
    assert f"version={version('outbox-harvester')}" in info
    assert f"name={BUSY.name}" in info


def test_what_is_not_known_has_no_sample() -> None:
    found = samples(replace(BUSY, backlog=None, term=None, leader_id=None, state=State.STANDBY))
    assert found["harvester_leader"] == 0
    assert not [name for name in found if re.match("harvester_(term|backlog|quarantine_)", name)]


def test_an_empty_outbox_has_the_age_zero() -> None:
    found = samples(replace(BUSY, backlog=Backlog(records=0, capped=False, oldest_age_s=None)))
    assert found["harvester_backlog_oldest_age_seconds"] == 0
    assert "harvester_quarantine_records" not in found


def test_ready_is_who_leads_or_could_and_the_text_says_what_is_missing() -> None:
    standby = replace(BUSY, state=State.STANDBY)
    ready = get("/readyz", Shown(standby))
    assert (ready.code, ready.body) == (200, b"standby\n")
    unready = get("/readyz", Shown(standby, unready="has not joined group g yet"))
    assert (unready.code, unready.body) == (503, b"standby: has not joined group g yet\n")
    # What is wrong with a part that readiness does not depend on is said all the same.
    troubled = get("/readyz", Shown(replace(standby, problem="archive: no privilege")))
    assert (troubled.code, troubled.body) == (200, b"standby: archive: no privilege\n")


def test_health_is_whether_threads_turn() -> None:
    assert get("/healthz", Shown()).code == 200
    stuck = get("/healthz", Shown(working=False))
    assert (stuck.code, stuck.body) == (503, b"a thread of the relay is stuck\n")
    failed = get("/healthz", Shown(replace(BUSY, state=State.FAILED), working=False))
    assert (failed.code, failed.body) == (503, b"failed\n")


def test_the_leader_says_under_which_term() -> None:
    leads = get("/leader", Shown())
    assert (leads.code, json.loads(leads.body)["term"]) == (200, 7)
    # A term without trust (leader_id) is no leadership.
    assert get("/leader", Shown(replace(BUSY, leader_id=None))).code == 503


def test_the_status_has_every_field() -> None:
    shown = json.loads(get("/status", Shown()).body)
    assert set(shown) == set(Status.__dataclass_fields__)
    assert shown["at"] == "2025-03-14T15:09:26Z"
    assert shown["shards"][1]["state"] == "ready"
    assert shown["backlog"]["oldest_age_s"] == 3.25


def test_other_paths_list_those_that_there_are() -> None:
    answer = get("/etc/passwd", Shown())
    assert answer.code == 404
    assert answer.body.decode().split() == ["/", "/metrics", "/healthz", "/readyz", "/leader", "/status"]


@pytest.mark.parametrize(
    ("outbox", "label"),
    [('"billing"."outbox"', 'outbox="billing.outbox"'), ('"outbox"', 'outbox="outbox"'), ("outbox", 'outbox="outbox"')],
)
def test_no_label_has_quotes_within_its_own(outbox: str, label: str) -> None:
    text = expose(replace(BUSY, outbox=outbox), TOTALS).decode()
    assert label in text
    assert '\\"' not in text
