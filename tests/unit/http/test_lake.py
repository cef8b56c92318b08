"""The metrics of a lake's job: what is known has a sample, and the page lists all of them."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from harvester.http.lake import LakeMetrics
from harvester.http.server import Request

PAGE = (Path(__file__).parents[3] / "docs" / "pipeline.md").read_text(encoding="utf-8")


def scraped(metrics: LakeMetrics) -> dict[str, float]:
    router = metrics.server("127.0.0.1", 0, lambda _: None, lambda _: None).router
    body = router.answer(Request("GET", "/metrics")).body
    assert isinstance(body, bytes)
    samples = (sample for family in text_string_to_metric_families(body.decode()) for sample in family.samples)
    return {one.name.removeprefix("harvester_lake_"): one.value for one in samples if "le" not in one.labels}


def test_what_is_not_known_has_no_sample() -> None:
    metrics = LakeMetrics()
    assert {"behind_records", "last_batch_timestamp_seconds"}.isdisjoint(scraped(metrics))
    metrics.take(records=5, repeats=2, rejects=1, seconds=0.5, behind=None)
    assert scraped(metrics).keys() & {"behind_records", "last_batch_timestamp_seconds"} == {
        "last_batch_timestamp_seconds"
    }
    metrics.take(records=5, repeats=0, rejects=0, seconds=1.5, behind=7)
    found = scraped(metrics)
    assert [found[name] for name in ("records_total", "repeats_total", "rejects_total", "behind_records")] == [
        10, 2, 1, 7
    ]  # fmt: skip
    assert [found["batch_seconds_count"], found["batch_seconds_sum"]] == [2, 2.0]


def test_the_page_lists_every_metric() -> None:
    metrics = LakeMetrics()
    metrics.take(records=0, repeats=0, rejects=0, seconds=0.0, behind=0)
    kinds = {name for name in scraped(metrics) if not name.endswith(("_created", "_count", "_sum"))} | {"batch_seconds"}
    assert {f"harvester_lake_{name}" for name in kinds} == set(re.findall(r"^\| `(harvester_lake_\w+)` \|", PAGE, re.M))
