"""vLLM's metrics: ours under vLLM's names and labels, so that its dashboards fill (`--metrics-names vllm`).

Each is a view of metrics of the catalogue. What is not counted here has no name here. Buckets are ours. Names
that vLLM had before are there too, since dashboards still ask for them.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from common.metrics import catalogue
from common.metrics.exposition import Gauges, Series, Values, all_labels, by_metric, histogram
from common.metrics.primitives import Histogram, Labels, Metric

ENGINE = "0"
"""The label `engine`: a pool is one server, as vLLM with one engine."""
REASONS = {"length": "length", "eos_token": "stop", "stop_sequence": "stop"} | {
    "budget": "length",
    "cancelled": "abort",
}
"""Our reasons → vLLM's; all others are `error`."""

Pick = Callable[[dict[str, str]], dict[str, str] | None]
"""The labels that vLLM's series has, of those of ours; None leaves ours out."""


@dataclass(frozen=True, slots=True)
class VllmMetric:
    """A metric of vLLM: the sum of the series of its sources that have the same labels there."""

    name: str
    sources: tuple[Metric, ...]
    pick: Pick = lambda _: {}


def named(*names: str, sources: Iterable[Metric], pick: Pick = lambda _: {}) -> list[VllmMetric]:
    """One metric, under each of its names."""
    return [VllmMetric(f"vllm:{name}", tuple(sources), pick) for name in names]


TABLE = (
    *named("num_requests_running", sources=[catalogue.BATCH_SIZE]),
    *named("num_requests_waiting", sources=[catalogue.QUEUE_SIZE]),
    *named("kv_cache_usage_perc", "gpu_cache_usage_perc", sources=[catalogue.KV_USAGE]),
    *named("prompt_tokens", sources=[catalogue.PREFILLED_TOKENS, catalogue.PREFIX_HITS]),
    *named("prompt_tokens_cached", sources=[catalogue.PREFIX_HITS]),
    *named("generation_tokens", sources=[catalogue.TOKENS]),
    *named("prefix_cache_queries", "gpu_prefix_cache_queries", sources=[catalogue.PREFIX_QUERIES]),
    *named("prefix_cache_hits", "gpu_prefix_cache_hits", sources=[catalogue.PREFIX_HITS]),
    *named("spec_decode_num_drafts", sources=[catalogue.PROPOSALS]),
    *named("spec_decode_num_draft_tokens", sources=[catalogue.PROPOSED_TOKENS]),
    *named("spec_decode_num_accepted_tokens", sources=[catalogue.ACCEPTED_TOKENS]),
    *named(
        "spec_decode_num_accepted_tokens_per_pos",
        sources=[catalogue.ACCEPTED_AT],
        pick=lambda labels: {"position": labels["position"]},
    ),
    *named(
        "num_preemptions",
        sources=[catalogue.RESUMES],
        pick=lambda labels: {} if labels["cause"] == "preempted" else None,
    ),
    *named(
        "request_success",
        sources=[catalogue.REQUESTS],
        pick=lambda labels: {"finished_reason": REASONS.get(labels["reason"], "error")},
    ),
    *named("time_to_first_token_seconds", sources=[catalogue.FIRST_TOKEN]),
    *named("inter_token_latency_seconds", "time_per_output_token_seconds", sources=[catalogue.TOKEN_LATENCY]),
    *named("request_time_per_output_token_seconds", sources=[catalogue.DECODE_PER_TOKEN]),
    *named("e2e_request_latency_seconds", sources=[catalogue.REQUEST_DURATION]),
    *named("request_queue_time_seconds", sources=[catalogue.QUEUE_DURATION]),
    *named("request_inference_time_seconds", sources=[catalogue.INFERENCE_DURATION]),
    *named("request_prefill_time_seconds", sources=[catalogue.PREFILL_DURATION]),
    *named("request_decode_time_seconds", sources=[catalogue.DECODE_DURATION]),
    *named("request_prompt_tokens", sources=[catalogue.INPUT_LENGTH]),
    *named("request_generation_tokens", sources=[catalogue.GENERATED_TOKENS]),
    *named("request_max_num_generation_tokens", sources=[catalogue.LONGEST_CHOICE]),
    *named("request_params_max_tokens", sources=[catalogue.MAX_NEW_TOKENS]),
)


class VllmCollector(Collector):
    """vLLM's metrics for prometheus_client.

    Args:
        values: the sums of all processes; None leaves out counters and histograms, as in `render_fleet`.
    """

    def __init__(self, model: str, values: Values | None, gauges: Gauges) -> None:
        self.labels = {"model_name": model, "engine": ENGINE}
        self.gauges = gauges
        self.has_sums = values is not None
        self.series = by_metric(values or {})

    def collect(self) -> Iterator[Family]:
        for metric in TABLE:
            first = metric.sources[0]
            if first.name in self.gauges if first.kind == "gauge" else self.has_sums:
                yield self.family(metric)
        if catalogue.MAX_LORAS.name in self.gauges:
            yield self.adapters()

    def adapters(self) -> Family:
        """The adapters of running and of waiting requests: names in labels, and the present as the value."""

        def names(metric: Metric) -> str:
            return ",".join(sorted(name for (name,), number in self.gauges[metric.name].items() if number))

        family = Family("vllm:lora_requests_info", "Adapters of running and waiting requests", "gauge")
        labels = {
            "max_lora": f"{self.gauges[catalogue.MAX_LORAS.name][()]:.0f}",
            "waiting_lora_adapters": names(catalogue.ADAPTER_WAITING),
            "running_lora_adapters": names(catalogue.ADAPTER_ROWS),
        }
        family.add_sample(family.name, labels, time.time())
        return family

    def family(self, metric: VllmMetric) -> Family:
        first = metric.sources[0]
        family = Family(metric.name, first.help, first.kind)
        for picked, parts in self.sums(metric).items():
            labels = self.labels | dict(picked)
            match first:
                case Histogram():
                    for suffix, more, value in histogram(first, labels, parts):
                        family.add_sample(f"{metric.name}{suffix}", more, value)
                case _:
                    suffix = "_total" if first.kind == "counter" else ""
                    family.add_sample(f"{metric.name}{suffix}", labels, parts.get("", 0.0))
        return family

    def sums(self, metric: VllmMetric) -> Mapping[tuple[tuple[str, str], ...], Mapping[str, float]]:
        """vLLM's labels → the sums of the parts of all series that have them."""
        found: dict[tuple[tuple[str, str], ...], dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for source in metric.sources:
            for labels, parts in self.series_of(source).items():
                picked = metric.pick(dict(zip(source.labels, labels, strict=True)))
                if picked is None:
                    continue
                sums = found[tuple(picked.items())]
                for part, value in parts.items():
                    sums[part] += value
        return found

    def series_of(self, source: Metric) -> Series:
        """The series of a metric of ours; those that it is known to have are 0 until they are counted."""
        if source.kind == "gauge":
            return {labels: {"": value} for labels, value in self.gauges[source.name].items()}
        series = self.series.get(source.name, {})
        known: dict[Labels, dict[str, float]] = {labels: {} for labels in all_labels(source, series)}
        return known | series
