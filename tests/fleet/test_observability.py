"""A worker dies under a whole fleet: metrics (scraped by a real Prometheus), logs and timeline record it.
Its engines have no model.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.support.chaos.launcher import ChaosFleet
from tests.support.fleet.fleet import Fleet
from tests.support.machine import ports
from tests.support.machine.ports import free_port, is_free
from tests.support.waiting import PATIENCE_S, wait_until, wait_until_sync

pytestmark = pytest.mark.slow

NUM_TOKENS = 160
KILLED_AT = 5
"""Tokens of a request: it must not end before its worker is killed, even if this process is slow."""
NUM_PROCESSES = 4
"""Processes with metrics of their own."""
needs_prometheus = pytest.mark.skipif(not shutil.which("prometheus"), reason="needs prometheus")
DEPLOY = Path(__file__).parents[2] / "deploy"
PROMETHEUS, DASHBOARD = DEPLOY / "prometheus", DEPLOY / "grafana" / "dashboards" / "tokenfleet.json"


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    settings: dict[str, Any] = {
        "num_workers": 2,
        "json_output": "true",
        "port": (port := free_ports(1 + NUM_PROCESSES)),
        "metrics_port": port + 1,
    }
    with ChaosFleet(step_ms=20.0, **settings) as fleet:
        wait_until_sync(lambda: fleet.workers_ready() == 2)
        yield fleet


@pytest.fixture(scope="module")
def request_id(fleet: Fleet) -> str:
    """The id of a request. Its worker is killed while it streams."""
    body = {"inputs": "The sky", "parameters": {"max_new_tokens": NUM_TOKENS, "ignore_eos": True}}
    with httpx.stream("POST", f"{fleet.base_url}/generate_stream", json=body, timeout=60) as response:
        name = response.headers["x-request-id"]
        seen = 0
        for line in response.iter_lines():
            seen += line.startswith("data:")
            if seen == KILLED_AT and line.startswith("data:"):
                placed = wait_until_sync(lambda: [e for e in timeline(fleet, name) if e["what"] == "placed"])
                os.kill(fleet.pid(placed[0]["worker"].split("-")[0]), signal.SIGKILL)
    assert seen == NUM_TOKENS
    wait_until_sync(lambda: timeline(fleet, name)[-1]["what"] == "ended")
    return name


def free_ports(count: int) -> int:
    """Return the first of several consecutive free ports, which no other process of the tests chooses."""
    while True:
        row = range(port := free_port(), port + count)
        if row[-1] in ports.PORTS and all(map(is_free, row)):
            return port


def get(fleet: Fleet, path: str) -> httpx.Response:
    return httpx.get(f"{fleet.base_url}{path}", timeout=PATIENCE_S)


def timeline(fleet: Fleet, request_id: str) -> list[dict[str, Any]]:
    """Return the timeline, as far as the batcher has written it."""
    answer = get(fleet, f"/fleet/requests/{request_id}").json()
    return list(answer.get("timelines", {}).get(request_id, []))


def metrics(fleet: Fleet) -> dict[str, float]:
    lines = get(fleet, "/metrics").text.splitlines()
    return {
        name: float(value)
        for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    }


def test_metrics_survive_the_worker(fleet: Fleet, request_id: str) -> None:
    """Each process adds its own counts once a second."""
    [shown] = [one["num_tokens"] for one in timeline(fleet, request_id) if one["what"] == "died"]
    by_gateway_and_batcher = {
        "tgi_request_success": 1,
        "tgi_request_generated_tokens_sum": NUM_TOKENS,
        'tokenfleet_request_resumes_total{cause="died",class="standard",pool="default"}': 1,
        'tokenfleet_workers_lost_total{pool="default"}': 1,
    }
    by_worker = 'tokenfleet_generated_tokens_total{pool="default"}'
    wait_until_sync(lambda: by_gateway_and_batcher.items() <= metrics(fleet).items())
    wait_until_sync(lambda: metrics(fleet).get(by_worker, 0) >= NUM_TOKENS - shown)
    found = metrics(fleet)
    assert (
        found['tgi_batch_inference_success{method="decode"}']
        > found['tgi_batch_inference_success{method="prefill"}']
        >= 1
    )
    for part in ("forward", "decode", "inference", "filter"):
        assert found[f'tgi_batch_{part}_duration_sum{{method="decode"}}'] > 0, part
    assert found["tgi_batch_next_size_count"] >= 1
    waited_s = found['tokenfleet_time_to_first_token_seconds_sum{class="standard",pool="default"}']
    assert 0 < found["tgi_request_queue_duration_sum"] < waited_s, "the prefill is not time in the queue"


@pytest.fixture(scope="module")
def prometheus(fleet: Fleet, request_id: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Prometheus with the file in deploy/prometheus, with other names and intervals; its URL."""
    folder, port = tmp_path_factory.mktemp("prometheus"), free_port()
    configuration = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    configuration["global"] = dict.fromkeys(
        ("scrape_interval", "scrape_timeout", "evaluation_interval"), "2s"
    )
    configuration["rule_files"] = [str(PROMETHEUS / "alerts.yml")]
    pool, processes = configuration["scrape_configs"]
    pool["static_configs"][0]["targets"] = [fleet.base_url.removeprefix("http://")]
    del processes["dns_sd_configs"], processes["relabel_configs"]
    own_ports = [int(fleet.settings["metrics_port"]) + i for i in range(NUM_PROCESSES)]
    processes["static_configs"] = [{"targets": [f"127.0.0.1:{port}" for port in own_ports]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(configuration))
    words = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    words += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"]
    with subprocess.Popen(["prometheus", *words]) as process:
        yield f"http://127.0.0.1:{port}"
        process.kill()


def panel_queries() -> list[str]:
    """The queries of all panels of the fleet's own dashboard, as Grafana sends them for one service and one
    pool, with rates of a minute.
    """
    panels = json.loads(DASHBOARD.read_text())["panels"]
    values = {"$service": "tokenfleet", "$pool": "default", "$__rate_interval": "1m"}
    queries = [target["expr"] for panel in panels for target in panel.get("targets", [])]
    for name, value in values.items():
        queries = [query.replace(name, value) for query in queries]
    return queries


async def values(client: httpx.AsyncClient, query: str) -> list[float]:
    with contextlib.suppress(httpx.HTTPError):
        answer = await client.get("/api/v1/query", params={"query": query})
        result = answer.json()["data"]["result"] if answer.status_code == 200 else []
        return [float(one["value"][1]) for one in result]
    return []


@needs_prometheus
async def test_prometheus_scrapes_the_fleet_and_each_process(prometheus: str) -> None:
    async with httpx.AsyncClient(base_url=prometheus) as client:
        for query, expected in {
            'up{job="tokenfleet"}': 1,
            'sum(up{job="processes"})': NUM_PROCESSES,
            'tgi_request_success{container="tokenfleet"}': 1,
            'count(process_resident_memory_bytes{job="processes"})': NUM_PROCESSES,
            'count(rate(tgi_request_success{container="tokenfleet"}[1m]))': 1,
        }.items():

            async def is_reached(query: str = query, expected: float = expected) -> bool:
                return await values(client, query) == [expected]

            await wait_until(is_reached)
        assert not [query for query in panel_queries() if not await values(client, query)]
        answer = await client.get("/api/v1/targets/metadata", params={"metric": "tgi_request_count"})
        assert {one["type"] for one in answer.json()["data"]} == {"counter"}
