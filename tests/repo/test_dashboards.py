"""Prometheus' and Grafana's files: they are valid, and ask for nothing that is not there."""

import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from api.admin.routes_fleet import render_fleet
from api.requests.monitors import SILENT_S
from common.metrics import catalogue

DEPLOY = Path(__file__).parents[2] / "deploy"
PROMETHEUS = DEPLOY / "prometheus"
GRAFANA = DEPLOY / "grafana"
BUILT_IN = {"up"}
OF_VLLM = """
e2e_request_latency_seconds_bucket e2e_request_latency_seconds_sum e2e_request_latency_seconds_count
prompt_tokens_total generation_tokens_total request_success_total time_per_output_token_seconds_bucket
time_per_output_token_seconds_sum inter_token_latency_seconds_bucket inter_token_latency_seconds_sum
inter_token_latency_seconds_count num_requests_running num_requests_waiting kv_cache_usage_perc
gpu_cache_usage_perc time_to_first_token_seconds_bucket time_to_first_token_seconds_sum
time_to_first_token_seconds_count request_prompt_tokens_bucket request_generation_tokens_bucket
request_queue_time_seconds_sum request_prefill_time_seconds_sum request_decode_time_seconds_sum
request_max_num_generation_tokens_sum prefix_cache_queries_total prefix_cache_hits_total
""".split()


@cache
def exported() -> set[str]:
    """Names of all series that a gateway can show."""
    gauges = {one.name: {("x",) * len(one.labels): 1.0} for one in catalogue.TABLE if one.kind == "gauge"}
    return set(re.findall(r"^(\w+)[{ ]", render_fleet("p", {}, gauges).decode(), re.MULTILINE))


def named(expression: str) -> set[str]:
    """Return the names of series in a PromQL expression, found by their selectors and our prefixes."""
    return set(re.findall(r"[a-z_]+(?={)", expression)) | set(
        re.findall(r"\b(?:tgi|tokenfleet)_\w+", expression)
    )


def expressions(value: Any) -> list[str]:
    """Return all expressions of a dashboard or of rules."""
    if isinstance(value, list):
        return [found for one in value for found in expressions(one)]
    if not isinstance(value, dict):
        return []
    own = [text for key in ("expr", "definition") if isinstance(text := value.get(key), str)]
    return own + [found for one in value.values() for found in expressions(one)]


@pytest.mark.parametrize(
    "path",
    [PROMETHEUS / "alerts.yml", PROMETHEUS / "vllm.rules.yml", GRAFANA / "dashboards" / "tokenfleet.json"],
    ids=lambda path: path.name,
)
def test_every_metric_of_a_dashboard_is_exported(path: Path) -> None:
    asked = expressions(yaml.safe_load(path.read_text()))
    assert len(asked) >= 8
    for expression in asked:
        assert named(expression) and named(expression) <= exported() | BUILT_IN, expression


def test_vllm_s_dashboard_finds_its_names() -> None:
    """The series of vLLM's own dashboard, by its older and its newer names."""
    [group] = yaml.safe_load((PROMETHEUS / "vllm.rules.yml").read_text())["groups"]
    assert {*OF_VLLM} <= {rule["record"].removeprefix("vllm:") for rule in group["rules"]}
    assert all(set(rule["labels"]) == {"model_name", "engine"} for rule in group["rules"])


def test_an_alert_fires_within_30_s_of_the_last_turn_of_a_batcher() -> None:
    """Gateways show it after two leases; a scrape follows, then evaluations until `for` is over."""
    [group] = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"]
    scrape = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())["global"]["scrape_interval"]
    [alert] = [rule for rule in group["rules"] if rule["alert"] == "NoActiveBatcher"]
    first_s = SILENT_S + seconds(scrape) + seconds(group["interval"])
    pending_s = -(-seconds(alert["for"]) // seconds(group["interval"])) * seconds(group["interval"])
    assert first_s + pending_s <= 30


def test_every_alert_stands_in_the_runbook() -> None:
    [group] = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"]
    runbook = (DEPLOY.parent / "docs" / "runbook.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", runbook, re.MULTILINE) == [rule["alert"] for rule in group["rules"]]


def seconds(duration: str) -> int:
    return int(duration.removesuffix("s"))


@pytest.mark.parametrize(
    "command",
    [
        "promtool check config prometheus.yml",
        "promtool check rules alerts.yml vllm.rules.yml",
        "promtool test rules rules_test.yml",
        "amtool check-config alertmanager.yml",
    ],
)
def test_the_files_pass_the_checks_of_their_own_tools(command: str) -> None:
    words = command.split()
    if not shutil.which(words[0]):
        pytest.skip(f"needs {words[0]}")
    done = subprocess.run(words, cwd=PROMETHEUS, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
