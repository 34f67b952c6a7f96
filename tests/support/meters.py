"""The real SDK of OpenTelemetry, which keeps in memory what it collects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import HistogramDataPoint, InMemoryMetricReader, Metric
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter


class Meters:
    """A meter provider of the test's own."""

    def __init__(self) -> None:
        self._reader = InMemoryMetricReader()
        self.provider = MeterProvider(metric_readers=[self._reader], shutdown_on_exit=False)

    def metrics(self) -> dict[str, Metric]:
        """All metrics that have a value now, by name."""
        data = self._reader.get_metrics_data()
        if data is None:
            return {}
        return {
            metric.name: metric
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }

    def points(self, name: str) -> list[Any]:
        """The points of a metric now."""
        metric = self.metrics().get(name)
        return [] if metric is None else list(metric.data.data_points)

    def value(self, name: str, **attributes: str) -> float:
        """The sum over the points that have these attributes; of a histogram, how many values it has recorded."""
        return sum(_value(point) for point in self.points(name) if attributes.items() <= _of(point).items())

    def by(self, name: str, key: str) -> dict[str, float]:
        """The values of a metric by one attribute, without zeros."""
        found = Counter[str]()
        for point in self.points(name):
            found[str(_of(point)[key])] += _value(point)
        return {each: found[each] for each in sorted(found) if found[each]}


def _value(point: Any) -> Any:
    return point.count if isinstance(point, HistogramDataPoint) else point.value


def _of(point: Any) -> Mapping[str, Any]:
    return dict(point.attributes or {})


class Traces:
    """A tracer provider of the test's own."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    def spans(self) -> tuple[ReadableSpan, ...]:
        """The spans that have ended, in that order."""
        return self._exporter.get_finished_spans()
