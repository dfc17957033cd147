"""GET /metrics: the metrics of the whole pool; every gateway returns the same."""

import asyncio
import contextlib
from collections import Counter
from datetime import UTC, datetime, timedelta

from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse, Response

from api.admin.routes_fleet import ProcessList, list_processes
from api.admin.routes_usage import metric_values
from api.http.openapi import HEALTH
from api.requests.metrics import fit_buckets, read_months
from api.requests.pool import Pool
from api.requests.service_terms import own_pool, pools_of
from common.adapters import AdapterLoad
from common.broker.client import CONNECT_TIMEOUT_S, ERRORS
from common.broker.pool_client import PoolClient
from common.messages.codec import WireError, decode
from common.metrics import catalogue
from common.metrics.catalogue import Labels, Metric
from common.metrics.exposition import CONTENT_TYPE, Gauges, Values, render

router = APIRouter(tags=[HEALTH])
MAX_ADAPTERS_SHOWN = 64


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
            totals = await read_totals(pool.client)
            state, fields = pool.client.keys.state, ["blocks", "adapters"]
            granted, load = await pool.client.redis.hmget(state, fields)  # type: ignore[misc]
            listed = await list_processes(pool.client, pool.batcher)
            gauges = {**gauges_of(listed, int(granted or 0)), **await broker_gauges(pool.client)}
            gauges |= adapter_gauges(pool, load)
            pools = pools_of(request).directory.pools.items()
            gauges |= {
                catalogue.POOL_UP.name: {(name,): float(one.is_live) for name, one in pools},
                catalogue.POOL_WAITING.name: {(name,): float(one.entry.waiting) for name, one in pools},
                catalogue.POOL_DEPTH.name: {(name,): one.entry.depth for name, one in pools},
            }
            now = datetime.fromtimestamp(pool.client.clock.now_s(), UTC)
            rows = await read_months(pool.client.redis, now, now + timedelta(seconds=1))  # this month
            names = {pool.settings.model_name, *(one.name for one in pool.adapters.registry.ready)}
            values = totals | metric_values(rows, names)
    if pool.workers.max_total_tokens:
        fit_buckets(pool.workers.limits)
    text = await asyncio.to_thread(render_fleet, pool.settings.pool, values, gauges)
    return Response(text, headers={"content-type": CONTENT_TYPE, "cache-control": "no-store"})


async def broker_gauges(client: PoolClient) -> Gauges:
    """Gauges that Redis itself has; used memory is in proportion to the memory that it may use."""
    info = await client.redis.info("memory")
    most = int(info.get("maxmemory") or 0) or int(info.get("total_system_memory") or 0)
    return {
        catalogue.UNFINISHED_JOBS.name: {(): float(await client.redis.xlen(client.keys.submit))},
        catalogue.WEBHOOKS_WAITING.name: {(): float(await client.redis.zcard(client.keys.webhooks))},
        catalogue.WEBHOOKS_DEAD.name: {(): float(await client.redis.zcard(client.keys.dead_webhooks))},
        catalogue.BROKER_MEMORY.name: {(): int(info["used_memory"]) / most if most else 0.0},
    }


def adapter_gauges(pool: Pool, load: bytes | None) -> Gauges:
    """Gauges of LoRA adapters, of which those with live requests have some; of too many the busiest."""
    found = AdapterLoad()
    with contextlib.suppress(WireError):
        found = decode(AdapterLoad, load) if load else found
    busiest = sorted(found.requests, key=lambda one: one[1] + one[2], reverse=True)[:MAX_ADAPTERS_SHOWN]
    return {
        catalogue.ADAPTER_ROWS.name: {(name,): float(running) for name, running, _ in busiest},
        catalogue.ADAPTER_WAITING.name: {(name,): float(waiting) for name, _, waiting in busiest},
        catalogue.MAX_LORAS.name: {(): float(pool.workers.adapter_room[0])},
    }


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


def render_fleet(pool: str, values: Values | None, gauges: Gauges) -> bytes:
    """Return the metrics of the whole pool.

    Args:
        values: the sums of all processes. None, if they are not known, leaves out all counters and
            histograms, because zeros would look like a restart.
        gauges: gauges that are not in it are left out.
    """
    known = [
        metric
        for metric in catalogue.TABLE
        if metric.name in gauges or (metric.kind != "gauge" and values is not None)
    ]
    return render(pool, known, values or {}, gauges)


async def read_totals(pool: PoolClient) -> dict[str, float]:
    """Return the sums of all processes, dead ones included, without fields that are no numbers."""
    found: dict[bytes, bytes] = await pool.redis.hgetall(pool.keys.metrics)  # type: ignore[misc]
    values = {}
    for name, value in found.items():
        with contextlib.suppress(ValueError):
            values[name.decode()] = float(value)
    return values
