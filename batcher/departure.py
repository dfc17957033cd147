"""Departure: when a batcher that was told to end may leave.

It leaves last: not before the gateways that end with it have finished their streams, unless another batcher
stands by.
"""

import asyncio
import contextlib
from collections.abc import Sequence

from batcher.lease import Lease
from common.broker.client import ERRORS
from common.broker.pool_client import PoolClient
from common.settings.settings import Settings

LOOKS_BEFORE_GONE = 2
"""Heartbeats within which processes that were told to end at the same time show it."""

GatewayState = tuple[str, int]
"""State and number of streams of a gateway's heartbeat."""


async def wait_until_unneeded(
    pool: PoolClient, settings: Settings, lease: Lease, told_to_end: asyncio.Event
) -> None:
    """Return when this batcher was told to end and may leave; GRACEFUL_TERMINATION_TIMEOUT bounds it."""
    await told_to_end.wait()
    looks = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(settings.graceful_termination_timeout):
            while lease.epoch and await is_needed(pool, lease.holder, looks):
                looks += 1
                await asyncio.sleep(settings.heartbeat_s)


async def is_needed(pool: PoolClient, own_name: str, looks: int) -> bool:
    try:
        batchers = [name for name in await pool.processes("batcher") if name != own_name]
        gateways = await pool.processes("gateway")
        async with pool.redis.pipeline(transaction=False) as pipe:
            for name in batchers:
                pipe.exists(pool.keys.process("batcher", name))
            for name in gateways:
                pipe.hmget(pool.keys.gateway(name), ["state", "streams"])
            answers = await pipe.execute()
    except ERRORS:
        return True
    states = [(state.decode(), int(streams or 0)) for state, streams in answers[len(batchers) :] if state]
    return must_stay(any(answers[: len(batchers)]), states, looks)


def must_stay(has_standby: bool, gateways: Sequence[GatewayState], looks: int) -> bool:
    """Whether the active batcher must stay. At first every gateway is waited for: it may have been told to
    end as well, and not have shown it yet.
    """
    if looks < LOOKS_BEFORE_GONE:
        return bool(gateways)
    return not has_standby and any(state == "draining" and streams for state, streams in gateways)
