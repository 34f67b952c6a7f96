"""The dashboard, the alerts and docs/metrics.md are true: each query names a metric that a Prometheus exporter exports,
each alert has a paragraph of runbook, and the picture is drawn from the dashboard."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from prometheus_client import REGISTRY

from asynclock import Redlock
from asynclock.otel import MOST_LABELS, OTHER, instrument
from tests.support.meters import Meters
from tests.support.probes import renew_now
from tests.support.waiters import until

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "monitoring"
PAGE = (ROOT / "docs" / "metrics.md").read_text("utf-8")
DASHBOARD = json.loads((FOLDER / "dashboard.json").read_text("utf-8"))
PANELS = DASHBOARD["panels"]
RULES = [
    rule for group in yaml.safe_load((FOLDER / "alerts.yml").read_text("utf-8"))["groups"] for rule in group["rules"]
]
QUERIES = {
    **{f"{panel['title']} {target['refId']}": target["expr"] for panel in PANELS for target in panel["targets"]},
    **{rule["alert"]: rule["expr"] for rule in RULES},
    **{
        variable["name"]: variable["definition"].removeprefix("label_values(").rpartition(",")[0]
        for variable in DASHBOARD["templating"]["list"]
        if variable["type"] == "query"
    },
}
OF_PROMETHEUS = {"le", "job", "instance"}  # labels that come with each histogram and each scrape
SELECTOR = re.compile(r"(asynclock_\w+)(?:\{([^}]*)\})?")
MATCHER = re.compile(r'(\w+)\s*(=~|!=|=)\s*"([^"]*)"')


async def use(client: Redlock, name: str) -> None:
    """Let each instrument get a value: an acquire that waits, a renewal, a hold."""
    async with client(name) as lease:
        waiter = asyncio.create_task(client(name).acquire())
        renew_now(lease)
        await until(lambda: client._counts_of_sessions()[0].waiting)
    lease_after = await waiter
    await lease_after.release()


@pytest.fixture
async def exported(shared_urls: list[str], name: str) -> Mapping[str, dict[str, set[str]]]:
    """What the real exporter exports: sample name -> label -> its values."""
    reader = PrometheusMetricReader()
    provider = MeterProvider(metric_readers=[reader], shutdown_on_exit=False)
    try:
        async with Redlock(*shared_urls) as client:
            instrument(client, meter_provider=provider)
            await use(client, name)
            found: dict[str, dict[str, set[str]]] = {}
            for metric in REGISTRY.collect():
                for sample in metric.samples:
                    if sample.name.startswith("asynclock_"):
                        labels = found.setdefault(sample.name, {})
                        for label, value in sample.labels.items():
                            labels.setdefault(label, set()).add(value)
            return found
    finally:
        provider.shutdown()


Exported = Mapping[str, dict[str, set[str]]]


def selectors(query: str) -> Iterator[tuple[str, list[tuple[str, str, str]]]]:
    """Each metric of a query, with its matchers."""
    for metric, matchers in SELECTOR.findall(query):
        yield metric, MATCHER.findall(matchers)


async def test_each_query_names_a_metric_that_exists(exported: Exported) -> None:
    """With labels that it has, and with values that they can have."""
    assert len(QUERIES) > 20
    for title, query in QUERIES.items():
        metrics = list(selectors(query))
        assert metrics, title
        for metric, matchers in metrics:
            assert metric in exported, title
            for label, operator, value in matchers:
                assert label in exported[metric], title
                assert operator == "=~" or value in exported[metric][label], title
            for labels in re.findall(r"by \(([^)]+)\)", query):
                assert {each.strip() for each in labels.split(",")} <= exported[metric].keys() | OF_PROMETHEUS, title


async def test_each_metric_is_in_a_query(exported: Exported) -> None:
    """A metric that nobody looks at helps nobody. A histogram has three sorts of samples."""
    queried = {metric.removesuffix("_bucket") for query in QUERIES.values() for metric, _ in selectors(query)}
    histograms = {each.removesuffix("_bucket") for each in exported if each.endswith("_bucket")}
    parts = {f"{each}_{part}" for each in histograms for part in ("bucket", "count", "sum")}
    assert (set(exported) - parts) | histograms <= queried


async def test_the_page_lists_the_instruments(shared_urls: list[str], name: str) -> None:
    """Each with its type, its unit and its attributes."""
    meters = Meters()
    async with Redlock(*shared_urls) as client:
        instrument(client, meter_provider=meters.provider)
        await use(client, name)
        found = {
            (metric.name, metric.unit, frozenset(key for point in metric.data.data_points for key in point.attributes))
            for metric in meters.metrics().values()
        }
    rows = re.findall(r"^\| `(asynclock\.[\w.]+)` \| [^|]+ \| ([^|]*) \| ([^|]*)\|", PAGE, re.MULTILINE)
    listed = {(each, unit.strip("` "), frozenset(re.findall(r"`(\w+)`", keys))) for each, unit, keys in rows}
    assert listed == found
    assert f"{MOST_LABELS} labels" in PAGE
    assert f"`{OTHER}`" in PAGE


def test_each_alert_has_a_paragraph_of_runbook() -> None:
    """What it means, and what to do; its url leads there."""
    anchors = set()
    for rule in RULES:
        page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert page.endswith("/docs/metrics.md")
        assert anchor == rule["alert"].lower()
        (paragraphs,) = re.findall(rf"^### {rule['alert']}\n\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL)
        assert "**Meaning.**" in paragraphs
        assert "**Action.**" in paragraphs
        assert rule["labels"]["severity"] in ("critical", "warning")
        anchors.add(anchor)
    assert len(anchors) == len(RULES) == len(re.findall(r"^### Asynclock", PAGE, re.MULTILINE))


def test_panels_do_not_overlap() -> None:
    """Each has a place and an id of its own, and explains itself."""
    cells = [
        (x, y)
        for grid in (panel["gridPos"] for panel in PANELS)
        for x in range(grid["x"], grid["x"] + grid["w"])
        for y in range(grid["y"], grid["y"] + grid["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in PANELS}) == len({panel["title"] for panel in PANELS}) == len(PANELS)
    assert all(panel["description"] for panel in PANELS)


def test_variables_of_the_dashboard_are_defined() -> None:
    """The data source and the label; Grafana's own begin with two underscores."""
    used = set(re.findall(r"\$\{?([a-z]\w*)", json.dumps(PANELS)))
    assert used == {variable["name"] for variable in DASHBOARD["templating"]["list"]} == {"datasource", "label"}


def test_the_picture_is_drawn_from_the_dashboard() -> None:
    """A change of the dashboard is drawn again before it is committed."""
    done = subprocess.run(
        [sys.executable, FOLDER / "draw.py", "--check"], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_picture_shows_each_panel() -> None:
    """With values of a real run; it is on the page, and needs no other file."""
    svg = (FOLDER / "dashboard.svg").read_text("utf-8")
    texts = {each.text for each in ET.fromstring(svg).iter() if each.tag.endswith("text")}
    sample: dict[str, Any] = json.loads((FOLDER / "sample.json").read_text("utf-8"))
    assert sample["panels"].keys() == {panel["title"] for panel in PANELS} <= texts
    assert all(sample["panels"].values())
    assert "](monitoring/dashboard.svg)" in PAGE
    assert "href" not in svg
    assert "url(" not in svg
