"""TGI's own Grafana dashboard: a real Prometheus that scrapes a fleet has data for each panel's queries."""

import asyncio
import contextlib
import json
import math
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.fleet.fleet import Fleet
from tests.support.machine.ports import free_port
from tests.support.waiting import wait_until

ONE = '{container="$service"}'
PREFILL = '{method="prefill", container="$service"}'
DECODE = '{method="decode", container="$service"}'
TENTHS = (0.5, 0.9, 0.99)


def quantile(share: float, series: str, labels: str) -> str:
    return f"histogram_quantile({share}, sum by (le) (rate({series}_bucket{labels}[10m])))"


QUANTILES = {
    "Number of tokens per prompt": ("tgi_request_input_length", ONE),
    "Number of generated tokens per request": ("tgi_request_generated_tokens", ONE),
    "Mean Time Per Token quantiles": ("tgi_request_mean_time_per_token_duration", ONE),
    "Speculated Tokens": ("tgi_request_skipped_tokens", ONE),
    "Latency quantiles": ("tgi_request_duration", ONE),
    "Queue quantiles": ("tgi_request_queue_duration", ONE),
    "Prefill Quantiles": ("tgi_batch_inference_duration", PREFILL),
    "Decode quantiles": ("tgi_batch_inference_duration", DECODE),
    "Forward quantiles": ("tgi_batch_forward_duration", DECODE),
    "Token Decode quantiles": ("tgi_batch_decode_duration", DECODE),
    "Filter Batch quantiles": ("tgi_batch_filter_duration", DECODE),
    "Batch Concat quantiles": ("tgi_batch_concat_duration", DECODE),
}
"""Panel → the histogram of which it shows three quantiles. "Prompt Tokens" is the first one again."""
HEATMAPS = {
    "Mean Time Per Token": QUANTILES["Mean Time Per Token quantiles"],
    "Prefill Latency": QUANTILES["Prefill Quantiles"],
    "Decode Latency": QUANTILES["Decode quantiles"],
    "Forward Latency": QUANTILES["Forward quantiles"],
    "Token Decode Latency": QUANTILES["Token Decode quantiles"],
    "Filter Batch Latency": QUANTILES["Filter Batch quantiles"],
    "Batch Concat latency": QUANTILES["Batch Concat quantiles"],
}
GENERATED = "tgi_request_generated_tokens"
OTHERS = {
    "Time to first token: queue": f"({quantile(0.5, 'tgi_request_queue_duration', ONE)} * 1000) > 0",
    "Time to first token: prefill": f"({quantile(0.5, 'tgi_batch_inference_duration', PREFILL)} * 1000) > 0",
    "Decode per-token latency": f"({quantile(0.5, 'tgi_batch_forward_duration', DECODE)} * 1000)>0",
    "Throughput": f"sum((rate({GENERATED}_sum{ONE}[10m]) / rate({GENERATED}_count{ONE}[10m]))>0)",
    "Requests": f"sum(increase(tgi_request_success{ONE}[1m]))",
    "Requests: failures": f"sum(increase(tgi_request_failure{ONE}[1m])) by (err)",
    "Number of replicas": f"count(tgi_request_count{ONE})",
    "Queue Size": f"sum(tgi_queue_size{ONE})",
    "Max tokens per batch": f"avg(tgi_batch_current_max_tokens{ONE})",
    "Batch Size": f"avg(tgi_batch_current_size{ONE})",
    "Concatenates": f"sum(increase(tgi_batch_concat{ONE}[1m])) by (reason)",
}
QUERIES = OTHERS | {
    f"{panel}: {share}": quantile(share, *asked) for panel, asked in QUANTILES.items() for share in TENTHS
}
QUERIES |= {
    panel: f"sum(increase({series}_bucket{labels}[5m])) by (le)"
    for panel, (series, labels) in HEATMAPS.items()
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@contextlib.contextmanager
def prometheus(program: str, target: str, directory: Path) -> Iterator[str]:
    """A Prometheus that scrapes `target` each second, as the container "tgi"; its URL."""
    targets = [{"targets": [target], "labels": {"container": "tgi"}}]
    jobs = [{"job_name": "tgi", "scrape_interval": "1s", "static_configs": targets}]
    (directory / "prometheus.yml").write_text(json.dumps({"scrape_configs": jobs}))
    listens = f"127.0.0.1:{free_port()}"
    words = [program, f"--config.file={directory / 'prometheus.yml'}", f"--web.listen-address={listens}"]
    with (directory / "log").open("w") as log:
        process = subprocess.Popen([*words, f"--storage.tsdb.path={directory / 'data'}"], stderr=log)
        try:
            yield f"http://{listens}"
        finally:
            process.terminate()
            process.wait(30)


async def test_every_panel_of_tgi_s_dashboard_has_data(tmp_path: Path) -> None:
    if not (program := shutil.which("prometheus")):
        pytest.skip("Prometheus is not installed (Debian's package `prometheus`)")
    with Fleet(num_workers=1, kv_cache_bytes="64MiB") as fleet:
        target = fleet.base_url.removeprefix("http://")
        with prometheus(program, target, tmp_path) as url:
            async with httpx.AsyncClient(timeout=60) as client:
                await wait_until(lambda: all_panels_have_data(client, fleet.base_url, url), 100)


async def all_panels_have_data(client: httpx.AsyncClient, fleet: str, url: str) -> bool:
    """Serve a row that others join and leave and a refused request, then ask Prometheus for all panels."""
    await asyncio.gather(ask(client, fleet, 96), ask_in_turn(client, fleet, (4, 0, 8)))
    empty = [panel for panel, query in QUERIES.items() if not await has_data(client, url, query)]
    print("empty:", empty)
    return not empty


async def ask_in_turn(client: httpx.AsyncClient, fleet: str, lengths: tuple[int, ...]) -> None:
    for tokens in lengths:
        await ask(client, fleet, tokens)


async def ask(client: httpx.AsyncClient, fleet: str, tokens: int) -> None:
    body = {"inputs": "The sky is blue because", "parameters": {"max_new_tokens": tokens}}
    answer = await client.post(f"{fleet}/generate", json=body)
    assert answer.status_code == (200 if tokens else 422), answer.text


async def has_data(client: httpx.AsyncClient, url: str, query: str) -> bool:
    """Whether Prometheus has a number for it."""
    asked = {"query": query.replace("$service", "tgi")}
    with contextlib.suppress(httpx.ConnectError):
        answer = (await client.get(f"{url}/api/v1/query", params=asked)).json()
        if answer["status"] != "success":
            return False
        return any(not math.isnan(float(one["value"][1])) for one in answer["data"]["result"])
    return False
