"""The dashboard for Grafana and the alert rules: they parse, and every metric that they name is exported."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from harvester.coordination.settings import PROCESSING_BOUNDS_S, Statistics
from harvester.http.consumers import ConsumerMetrics
from harvester.http.pages import expose
from harvester.telemetry.metrics import SOURCES
from tests.unit.http.test_pages import BUSY, TOTALS

DOCS = Path(__file__).parents[3] / "docs"
RULES = yaml.safe_load((DOCS / "alerts" / "harvester.rules.yml").read_text(encoding="utf-8"))
BOARD = json.loads((DOCS / "grafana" / "harvester.json").read_text(encoding="utf-8"))
RUNBOOKS = "https://github.com/outbox-harvester/harvester/blob/main/docs/runbooks.md"
PAGE = (DOCS / "operations.md").read_text(encoding="utf-8")

_SELECTOR = re.compile(r"\{([^{}]*)\}")
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring)\s*\(([^()]*)\)")
_METRIC = re.compile(r"\b((?:harvester|process)_[a-z_]+)\b")
_FUNCTIONS = {"sum", "max", "min", "rate", "increase", "absent", "histogram_quantile", "label_values"}
_FUNCTIONS |= {"max_over_time", "avg_over_time"}
_GIVEN = {"job", "instance", "le"}  # by Prometheus itself, and by histograms


def exported() -> dict[str, set[str]]:
    """Names of all samples, each with its labels."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(expose(BUSY, TOTALS).decode()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def rules() -> list[dict[str, Any]]:
    return [rule for group in RULES["groups"] for rule in group["rules"]]


def expressions() -> Iterator[str]:
    """Every query in both files."""
    for rule in rules():
        yield rule["expr"]
    for panel in BOARD["panels"]:
        for target in panel["targets"]:
            yield target["expr"]
    for variable in BOARD["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"]


@pytest.mark.parametrize("expression", sorted(set(expressions())))
def test_every_query_asks_for_what_is_exported(expression: str) -> None:
    names = exported()
    asked = _METRIC.findall(expression)
    assert asked
    assert set(asked) <= set(names)
    known = _GIVEN.union(*(names[name] for name in asked))
    for selector in _SELECTOR.findall(expression):
        for label, value in re.findall(r'(\w+)=~?"([^"]*)"', selector):
            assert label in known
            assert label != "source" or set(value.split("|")) <= set(SOURCES)
    for grouping in _GROUPING.findall(expression):
        assert set(re.split(r",\s*", grouping)) <= known
    assert expression.count("(") == expression.count(")")
    bare = _GROUPING.sub("", re.sub(r"\[[^\]]*\]", "", _SELECTOR.sub("", expression)))
    assert set(re.findall(r"([a-z_]+)\s*\(", bare)) <= _FUNCTIONS
    for function in ("rate", "increase"):  # of counters only
        for name in re.findall(rf"\b{function}\((\w+)", expression):
            assert name.endswith(("_total", "_bucket"))


def test_the_page_lists_the_metrics_of_consumers() -> None:
    consumer: Any = SimpleNamespace(
        settings=SimpleNamespace(group="billing"), client=SimpleNamespace(id="me"),
        claims=dict, lag=dict, ages=dict, open_records=dict,
        statistics=lambda: Statistics(0, 0, 0, 0, 0, 0, {}, 0, 0, processing=(0,) * (len(PROCESSING_BOUNDS_S) + 1)),
    )  # fmt: skip
    families = ConsumerMetrics(consumer).collect()
    made = {family.name + ("_total" if family.type == "counter" else "") for family in families}
    page = (DOCS / "consuming.md").read_text(encoding="utf-8")
    assert set(re.findall(r"`(harvester_consumer_\w+)`", page)) == made


def test_every_rule_is_whole() -> None:
    assert len({rule["alert"] for rule in rules()}) == len(rules())
    for rule in rules():
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert re.fullmatch(r"Harvester[A-Za-z]+", rule["alert"])
        assert re.fullmatch(r"\d+[smh]", rule.get("for", "1m"))
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
        for label in re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]):
            assert re.search(rf"by \([^)]*\b{label}\b[^)]*\)", rule["expr"]), f"{label} is not in the result"


def test_prometheus_takes_every_rule() -> None:
    for rule in rules():
        promql_parser.parse(rule["expr"])
    for panel in BOARD["panels"]:
        for target in panel["targets"]:
            text = target["expr"].replace("$__rate_interval", "5m").replace("$__interval", "1m")
            promql_parser.parse(text)


def test_every_alert_has_a_section_that_says_what_to_do() -> None:
    page = (DOCS / "runbooks.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (\w+)$", page, re.MULTILINE) == [rule["alert"] for rule in rules()]
    for rule in rules():
        assert rule["annotations"]["runbook_url"] == f"{RUNBOOKS}#{rule['alert'].lower()}"


def test_what_must_wake_somebody_is_there() -> None:
    assert "max by (job) (harvester_quarantine_records) > 0" in [rule["expr"] for rule in rules()]
    asked = " ".join(rule["expr"] for rule in rules())
    assert "(up == 0)" in asked
    for name in ("leader", "backlog_oldest_age_seconds", "shard_restarts_total", "shard_errors_total"):
        assert f"harvester_{name}" in asked
    for source in SOURCES:
        assert re.search(rf'source=~?"[a-z|]*\b{source}\b', asked)


def test_the_objective_is_told_as_it_is_asked() -> None:
    """Times and shares in the words are those in the queries."""
    found = {rule["alert"]: rule for rule in rules() if "Budget" in rule["alert"]}
    budget_s = 30 * 86400 * 0.001
    for name, long_s, share in (("Fast", 3600, 0.02), ("Slowly", 6 * 3600, 0.05)):
        rule = found[f"HarvesterFreshnessBudgetBurns{name}"]
        (factor, *others) = {float(each) for each in re.findall(r"> ([\d.]+) \* 0\.001", rule["expr"])}
        assert others == []
        assert factor * 0.001 * long_s == pytest.approx(share * budget_s, rel=0.01)
        windows = re.findall(r"\[(\d+)([hm]):15s\]", rule["expr"])
        seconds = [int(number) * {"h": 3600, "m": 60}[unit] for number, unit in windows]
        assert seconds[0] == long_s
        assert seconds[1] == long_s / 12
        assert set(re.findall(r"> bool (\d+)", rule["expr"])) == {"5"}
        assert "longer than 5 s" in rule["annotations"]["summary"]


def test_the_dashboard_is_whole() -> None:
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
    places = [panel["gridPos"] for panel in BOARD["panels"]]
    cells = [(x, y) for p in places for x in range(p["x"], p["x"] + p["w"]) for y in range(p["y"], p["y"] + p["h"])]
    assert len(cells) == len(set(cells)), "panels overlap"
    assert all(p["x"] + p["w"] <= 24 for p in places)
    for panel in BOARD["panels"]:
        assert panel["datasource"]["uid"] == "${datasource}"
        assert all('job="$job"' in target["expr"] for target in panel["targets"])


def test_the_page_explains_every_metric() -> None:
    families = {family.name for family in text_string_to_metric_families(expose(BUSY, TOTALS).decode())}
    families = {name for name in families if not name.startswith("process_")}
    documented = set(re.findall(r"^\| `(harvester_[a-z_]+?)(?:_total)?(?:\{\w+\})?` \|", PAGE, re.MULTILINE))
    assert documented == families
