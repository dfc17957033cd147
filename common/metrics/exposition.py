"""Exposition: metrics in Prometheus' text format, by prometheus_client. TGI's counters have no suffix
`_total`.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import product

from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from common.metrics.catalogue import BY_NAME, COUNTED, POOL, TABLE
from common.metrics.primitives import INFINITY, SEPARATOR, SUM, Counter, Histogram, Labels, Metric, Summary

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
QUANTILES = ("0", "0.5", "0.9", "0.95", "0.99", "0.999", "1")
TGI_COUNTER = re.compile(rb"^(# (?:HELP|TYPE) tgi_\w+)_total ", re.MULTILINE)

Values = Mapping[str, float]
Series = dict[Labels, dict[str, float]]
Gauges = Mapping[str, Mapping[Labels, float]]


def own_values() -> dict[str, float]:
    """The counts of this process, under the names that `Metric.field` returns."""
    return {name: value for metric in COUNTED for name, value in metric.fields()}


def render_own(pool: str) -> bytes:
    """The counts of this process alone, and its memory and processor time."""
    return render(FleetCollector(pool, COUNTED, own_values(), {})) + generate_latest(REGISTRY)


def render_fleet(pool: str, values: Values | None, gauges: Gauges) -> bytes:
    """The metrics of the whole pool.

    Args:
        values: the sums of all processes. None, if they are not known, leaves out all counters and
            histograms, because zeros would look like a restart.
        gauges: gauges that are not in it are left out.
    """
    known = [
        metric for metric in TABLE if metric.name in gauges or (metric.kind != "gauge" and values is not None)
    ]
    return render(FleetCollector(pool, known, values or {}, gauges))


def render(collector: "FleetCollector") -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return TGI_COUNTER.sub(rb"\1 ", generate_latest(registry))


class FleetCollector(Collector):
    """Metrics and their values for prometheus_client. Unknown fields are left out."""

    def __init__(self, pool: str, metrics: Iterable[Metric], values: Values, gauges: Gauges) -> None:
        self.pool = pool
        self.metrics = metrics
        self.gauges = gauges
        self.series = by_metric(values)

    def collect(self) -> Iterator[Family]:
        for metric in self.metrics:
            series = self.series.get(metric.name, {})
            match metric:
                case Counter():
                    yield self.counter(metric, series)
                case Histogram():
                    yield self.histogram(metric, series)
                case Summary():
                    yield zero_summary(metric)
                case _:
                    yield self.gauge(metric)

    def names(self, metric: Metric) -> list[str]:
        """Label names; ours begin with the pool."""
        return [*([] if metric.name.startswith("tgi_") else [POOL]), *metric.labels]

    def labels(self, metric: Metric, labels: Labels) -> list[str]:
        return [*([] if metric.name.startswith("tgi_") else [self.pool]), *labels]

    def counter(self, metric: Metric, series: Series) -> Family:
        family = Family(metric.name, metric.help, "counter")
        sample = metric.name if metric.name.startswith("tgi_") else f"{metric.name}_total"
        names = self.names(metric)
        for labels in all_labels(metric, series):
            value = series.get(labels, {}).get("", 0.0)
            family.add_sample(sample, dict(zip(names, self.labels(metric, labels), strict=True)), value)
        return family

    def histogram(self, metric: Histogram, series: Series) -> Family:
        family = HistogramMetricFamily(metric.name, metric.help, labels=self.names(metric))
        for labels in all_labels(metric, series):
            parts = series.get(labels, {})
            family.add_metric(
                self.labels(metric, labels), cumulative(metric.bounds, parts), parts.get(SUM, 0.0)
            )
        return family

    def gauge(self, metric: Metric) -> Family:
        family = GaugeMetricFamily(metric.name, metric.help, labels=self.names(metric))
        for labels, value in self.gauges[metric.name].items():
            family.add_metric(self.labels(metric, labels), value)
        return family


def by_metric(values: Values) -> dict[str, Series]:
    """Values by metric, label values and part."""
    found: dict[str, Series] = defaultdict(lambda: defaultdict(dict))
    for name, value in values.items():
        first, *labels = name.split(SEPARATOR)
        metric = BY_NAME.get(first)
        if (
            metric is not None
            and len(labels) == len(metric.labels) + 1
            and is_part(metric, part := labels.pop())
        ):
            found[first][tuple(labels)][part] = value
    return found


def is_part(metric: Metric, part: str) -> bool:
    if isinstance(metric, Counter):
        return part == ""
    try:
        return part == SUM or float(part) > 0
    except ValueError:
        return False


def all_labels(metric: Metric, series: Series) -> list[Labels]:
    """Label values that the catalogue knows, and those that have occurred."""
    return sorted({*product(*metric.labels.values()), *series})


def cumulative(bounds: tuple[float, ...], parts: Mapping[str, float]) -> list[tuple[str, float]]:
    """Cumulative buckets, with the bounds of this process and those of processes that had others."""
    counts = dict.fromkeys(bounds, 0.0) | {
        float(part): count for part, count in parts.items() if part not in (SUM, "")
    }
    total = 0.0
    buckets = []
    for bound in sorted(counts):
        total += counts[bound]
        buckets.append((str(floatToGoString(bound)), total))  # type: ignore[no-untyped-call]
    assert bounds[-1] == INFINITY
    return buckets


def zero_summary(metric: Metric) -> Family:
    """A summary without observations."""
    family = Family(metric.name, metric.help, "summary")
    for quantile in QUANTILES:
        family.add_sample(metric.name, {"quantile": quantile}, 0.0)
    family.add_sample(f"{metric.name}_sum", {}, 0.0)
    family.add_sample(f"{metric.name}_count", {}, 0.0)
    return family
