"""vLLM's names of our metrics: all that its dashboards ask for, with the sums of ours."""

import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from common.metrics import catalogue
from common.metrics.exposition import Gauges, Values, render_fleet
from common.metrics.vllm_names import TABLE, VllmCollector

OF_DASHBOARDS = """
vllm:e2e_request_latency_seconds_bucket vllm:e2e_request_latency_seconds_sum
vllm:e2e_request_latency_seconds_count vllm:prompt_tokens_total vllm:generation_tokens_total
vllm:request_success_total vllm:time_per_output_token_seconds_bucket
vllm:time_per_output_token_seconds_sum vllm:inter_token_latency_seconds_bucket
vllm:inter_token_latency_seconds_sum vllm:inter_token_latency_seconds_count
vllm:num_requests_running vllm:num_requests_waiting vllm:kv_cache_usage_perc
vllm:gpu_cache_usage_perc vllm:time_to_first_token_seconds_bucket
vllm:time_to_first_token_seconds_sum vllm:time_to_first_token_seconds_count
vllm:request_prompt_tokens_bucket vllm:request_generation_tokens_bucket
vllm:request_queue_time_seconds_sum vllm:request_prefill_time_seconds_sum
vllm:request_decode_time_seconds_sum vllm:request_max_num_generation_tokens_sum
vllm:prefix_cache_queries_total vllm:prefix_cache_hits_total
""".split()
"""The series of vLLM's own Grafana dashboard, with their older and their newer names."""
GAUGES: Gauges = {one.name: {("x",) * len(one.labels): 0.5} for one in catalogue.TABLE if one.kind == "gauge"}


def numbers(values: Values | None, gauges: Gauges = GAUGES) -> dict[str, float]:
    text = render_fleet("p", values, gauges, VllmCollector("smollm2", values, gauges)).decode()
    families = list(text_string_to_metric_families(text))
    assert len({one.name for one in families}) == len(families)
    samples = [one for family in families for one in family.samples if one.name.startswith("vllm:")]
    samples = [one for one in samples if one.name != "vllm:lora_requests_info"]  # it names no model
    assert all(one.labels["model_name"] == "smollm2" and one.labels["engine"] == "0" for one in samples)
    labels = ("model_name", "engine")
    return {
        " ".join([one.name, *(f"{k}={v}" for k, v in one.labels.items() if k not in labels)]): one.value
        for one in samples
    }


@pytest.mark.parametrize("name", OF_DASHBOARDS)
def test_all_that_its_dashboard_asks_for_is_there_before_the_first_request(name: str) -> None:
    assert [one for one in numbers({}) if one.split()[0] == name]


def test_classes_are_summed_and_reasons_are_its_own() -> None:
    counts = {
        "tokenfleet_requests|standard|eos_token|": 3.0,
        "tokenfleet_requests|interactive|stop_sequence|": 2.0,
        "tokenfleet_requests|standard|cancelled|": 1.0,
        "tokenfleet_requests|standard|timeout|": 5.0,
        "tokenfleet_request_resumes|standard|preempted|": 4.0,
        "tokenfleet_request_resumes|standard|died|": 7.0,
        "tokenfleet_prefilled_tokens|": 100.0,
        "tokenfleet_prefix_cache_hits|": 20.0,
    }
    found = numbers(counts)
    success = {name.split("=")[1]: value for name, value in found.items() if "request_success" in name}
    assert success == {"stop": 5, "length": 0, "abort": 1, "error": 5}
    assert found["vllm:num_preemptions_total"] == 4
    assert (found["vllm:prompt_tokens_total"], found["vllm:prompt_tokens_cached_total"]) == (120, 20)
    assert found["vllm:num_requests_running"] == found["vllm:kv_cache_usage_perc"] == 0.5


def test_histograms_of_all_classes_are_one() -> None:
    name = "tokenfleet_time_to_first_token_seconds"
    counts = {f"{name}|{one}|0.05": 2.0 for one in ("standard", "batch")} | {f"{name}|standard|sum": 0.08}
    found = numbers(counts)
    buckets = [
        value for key, value in found.items() if key.startswith("vllm:time_to_first_token_seconds_bucket")
    ]
    assert buckets == sorted(buckets) and buckets[-1] == 4
    assert found["vllm:time_to_first_token_seconds_count"] == 4
    assert found["vllm:time_to_first_token_seconds_sum"] == 0.08


def test_without_the_broker_it_has_nothing() -> None:
    assert numbers(None, {catalogue.BROKER_UP.name: {(): 0.0}}) == {}


def test_every_name_is_documented() -> None:
    page = (Path(__file__).parents[4] / "docs" / "metrics.md").read_text()
    listed = set(re.findall(r"vllm:(\w+)", page))
    names = {one.name.removeprefix("vllm:") for one in TABLE if not one.name.startswith("vllm:gpu_prefix")}
    assert {name for name in names if not {name, f"{name}_total"} & listed} == set()
