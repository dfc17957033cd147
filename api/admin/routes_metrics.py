"""GET /metrics: the metrics of the whole pool; every gateway returns the same."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse, Response

from api.admin.processes import ProcessList, list_processes
from api.http.openapi import HEALTH
from api.requests.metrics import fit_buckets
from api.requests.pool_registry import own_pool
from common.broker.client import CONNECT_TIMEOUT_S, ERRORS
from common.broker.pool_client import PoolClient
from common.metrics import aggregate, catalogue
from common.metrics.exposition import CONTENT_TYPE, Gauges, Values, render_fleet
from common.metrics.primitives import Labels, Metric
from common.metrics.vllm_names import VllmCollector

router = APIRouter(tags=[HEALTH])


@router.get("/metrics", summary="Prometheus metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Returns the metrics of all processes of the pool in Prometheus' text format: scrape one gateway only.
    While the broker does not answer, the only metric is `tokenfleet_broker_up 0`.
    """
    pool = own_pool(request)
    values: Values | None = None
    gauges: Gauges = {catalogue.BROKER_UP.name: {(): 0.0}}
    with contextlib.suppress(*ERRORS):
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            totals = await aggregate.read_totals(pool.client)
            granted = await pool.client.redis.hget(pool.client.keys.state, "blocks")  # type: ignore[misc]
            listed = await list_processes(pool.client, pool.batcher)
            gauges = {**gauges_of(listed, int(granted or 0)), **await broker_gauges(pool.client)}
            values = totals
    if pool.workers.max_total_tokens:
        fit_buckets(pool.workers.limits)
    has_vllm = pool.settings.metrics_names == "vllm"
    more = [VllmCollector(pool.settings.model_name, values, gauges)] if has_vllm else []
    text = await asyncio.to_thread(render_fleet, pool.settings.pool, values, gauges, *more)
    return Response(text, headers={"content-type": CONTENT_TYPE, "cache-control": "no-store"})


async def broker_gauges(client: PoolClient) -> Gauges:
    """Gauges that Redis itself has."""
    return {
        catalogue.UNFINISHED_JOBS.name: {(): float(await client.redis.xlen(client.keys.submit))},
        catalogue.BROKER_MEMORY.name: {(): memory_ratio(await client.redis.info("memory"))},
    }


def memory_ratio(info: Mapping[str, Any]) -> float:
    """Used memory in proportion to the memory that Redis may use, from its INFO."""
    available = int(info.get("maxmemory") or 0) or int(info.get("total_system_memory") or 0)
    return int(info["used_memory"]) / available if available else 0.0


def gauges_of(listed: ProcessList, num_granted: int) -> Gauges:
    """Gauges from the processes' heartbeats; `num_granted` KV blocks are granted to rows."""
    requests, workers = listed.requests, listed.of_kind("worker")
    loaded = [worker for worker in workers if worker["num_blocks"]]
    num_blocks = sum(worker["num_blocks"] for worker in loaded)
    max_tokens = sum(worker["num_blocks"] * worker["block_size"] for worker in loaded)
    usage = num_granted / num_blocks if num_blocks else 0.0
    return {
        catalogue.QUEUE_SIZE.name: {(): requests["waiting"]},
        catalogue.LIVE_REQUESTS.name: {(): requests["live"]},
        catalogue.BATCH_SIZE.name: {(): requests["running"]},
        catalogue.BATCH_MAX_TOKENS.name: {(): usage * max_tokens},
        catalogue.BATCH_TOTAL_TOKENS.name: {(): usage * max_tokens},
        catalogue.MAX_TOTAL_TOKENS.name: {(): max_tokens},
        catalogue.KV_USAGE.name: {(): usage},
        catalogue.WORKERS.name: count_states(catalogue.WORKERS, workers),
        catalogue.BATCHERS.name: count_states(catalogue.BATCHERS, listed.of_kind("batcher")),
        catalogue.BROKER_UP.name: {(): 1.0},
    }


def count_states(metric: Metric, processes: list[dict[str, object]]) -> dict[Labels, float]:
    """The number of processes in each state; 0 for known states without a process."""
    known = dict.fromkeys(metric.labels["state"], 0)
    counts = Counter(str(process["state"]) for process in processes)
    return {(state,): float(count) for state, count in (known | counts).items()}
