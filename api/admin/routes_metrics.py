"""GET /metrics: the figures of the whole pool, the same from every gateway."""

import asyncio
from collections import Counter

from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse, Response

from api import meter, roll
from api.gateway import gateway_of
from api.roll import Roll
from common import metrics, tally
from common.broker import CONNECT_TIMEOUT_S, ERRORS
from common.exposition import CONTENT_TYPE, Gauges, Values, fleet_text
from common.meters import Labels

router = APIRouter()


@router.get("/metrics", response_class=PlainTextResponse)
async def figures(request: Request) -> Response:
    """What all processes of the pool have counted, and what the broker shows now; without a broker, that there is none."""
    gateway = gateway_of(request)
    redis, keys = gateway.redis, gateway.fleet.keys
    values: Values | None = None
    gauges: Gauges = {metrics.BROKER_UP.name: {(): 0.0}}
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            values = await tally.read(redis, keys)
            granted = await redis.hget(keys.state, "blocks")  # type: ignore[misc]
            gauges = gauges_of(await roll.call(redis, keys), int(granted or 0))
    except ERRORS:
        values = None
    if gateway.fleet.max_total_tokens:
        meter.fit(gateway.fleet.limits)
    text = await asyncio.to_thread(fleet_text, gateway.settings.pool, values, gauges)
    return Response(text, headers={"content-type": CONTENT_TYPE, "cache-control": "no-store"})


def gauges_of(called: Roll, num_granted: int) -> Gauges:
    """What there is, by the processes' own words; `num_granted` KV blocks are granted to rows."""
    requests, workers = called.requests, called.of("worker")
    able = [one for one in workers if one["num_blocks"]]
    num_blocks = sum(one["num_blocks"] for one in able)
    max_tokens = sum(one["num_blocks"] * one["block_size"] for one in able)
    usage = num_granted / num_blocks if num_blocks else 0.0
    return {
        metrics.QUEUE_SIZE.name: {(): requests["waiting"]},
        metrics.LIVE_REQUESTS.name: {(): requests["live"]},
        metrics.BATCH_SIZE.name: {(): requests["running"]},
        metrics.BATCH_MAX_TOKENS.name: {(): usage * max_tokens},
        metrics.BATCH_TOTAL_TOKENS.name: {(): usage * max_tokens},
        metrics.MAX_TOTAL_TOKENS.name: {(): max_tokens},
        metrics.KV_USAGE.name: {(): usage},
        metrics.WORKERS.name: states(workers),
        metrics.BROKER_UP.name: {(): 1.0},
    }


def states(workers: list[dict[str, object]]) -> dict[Labels, float]:
    """How many workers are in each state; known states are there with none, too."""
    known = dict.fromkeys(metrics.WORKERS.labels["state"], 0)
    counts = Counter(str(one["state"]) for one in workers)
    return {(state,): float(count) for state, count in (known | counts).items()}
