"""Alert rules and dashboard speak of metrics that the service exports, with the labels that these have."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from ratchet_contract.phases import Cause, JobPhase, Outcome
from ratchet_service.observability.metrics import Instruments

FOLDER = Path(__file__).parents[3] / "deploy" / "monitoring"
METRIC = re.compile(r"\b(ratchet_\w+)(?:\{([^}]*)\})?")
GROUPED = re.compile(r"\bby \(([^)]*)\)")


def exported() -> dict[str, set[str]]:
    """Names as they are scraped, and the labels of each."""
    registry: CollectorRegistry = Instruments()._registry
    out: dict[str, set[str]] = {}
    for collector in registry._collector_to_names:
        metric: Any = collector
        labels = set(metric._labelnames)
        for name in registry._collector_to_names[collector]:
            out[name] = labels | ({"le"} if name.endswith("_bucket") else set())
    return out


def rules() -> list[dict[str, Any]]:
    found = yaml.safe_load((FOLDER / "ratchet.rules.yaml").read_text())
    return [rule for group in found["groups"] for rule in group["rules"]]


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / "ratchet.dashboard.json").read_text())
    return found


def expressions() -> Iterator[str]:
    yield from (rule["expr"] for rule in rules())
    for panel in dashboard()["panels"]:
        yield from (target["expr"] for target in panel["targets"])


@pytest.mark.parametrize("expression", list(expressions()))
def test_dashboard_and_alert_queries_use_exported_metrics_and_labels(expression: str) -> None:
    known = exported()
    used = METRIC.findall(expression)
    assert used or expression.startswith("up{")
    of_all = set.intersection(*(known.get(name, set()) for name, _ in used)) if used else set()
    for name, matchers in used:
        assert name in known, f"{name} is exported by nobody"
        for label, value in re.findall(r'(\w+)\s*[=!]~?\s*"([^"]*)"', matchers):
            assert label in known[name], f"{name} has no label {label}"
            values = {"phase": JobPhase, "outcome": Outcome, "cause": Cause}.get(label)
            if values is not None:
                assert set(value.split("|")) <= {one.value for one in values}
    for names in GROUPED.findall(expression):
        assert {name.strip() for name in names.split(",")} <= of_all | {"instance", "le"}


def test_alerts_have_summaries_and_panels_have_unique_positions() -> None:
    assert len({rule["alert"] for rule in rules()}) == len(rules())
    assert all(rule["annotations"]["summary"] and rule["labels"]["severity"] for rule in rules())
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in dashboard()["panels"]]
    assert len(set(places)) == len(places) and len({panel["id"] for panel in dashboard()["panels"]}) == len(places)


def test_every_metric_is_somewhere_on_the_dashboard() -> None:
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for text in expressions() for name, _ in METRIC.findall(text)}
    there = {re.sub(r"_(bucket|sum|count|created)$", "", name) for name in exported()}
    counters = {name.removesuffix("_total") for name in shown}
    assert {name.removesuffix("_total") for name in there} - counters == {"ratchet_build_info"}
