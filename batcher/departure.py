"""Departure: when a batcher that was told to end may leave.

It leaves last: not before the gateways that end with it have finished their streams, unless another batcher
stands by. Others are believed by what they have said since it was told: a process that was told at the same
time and had no core since still looks as before.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from batcher.lease import Lease
from common.broker.client import ERRORS
from common.broker.pool_client import PoolClient
from common.settings.settings import Settings

HEARTBEATS_TO_SHOW = 2
"""Heartbeats within which a process that was told to end at the same time shows it: one may be on its way."""
ENDING = ("draining", "died")


class GatewayState(NamedTuple):
    """What is known of a gateway.

    Attributes:
        num_streams: those that it has not finished.
        is_believed: whether it has sent enough heartbeats since this batcher was told to end.
    """

    state: str
    num_streams: int
    is_believed: bool


class HeartbeatCount:
    """How many heartbeats of each process were seen since the first look, at most one a look."""

    def __init__(self) -> None:
        self.seen_ms: dict[str, float] = {}
        self.counts: Counter[str] = Counter()

    def look(self, last_ms: Mapping[str, float]) -> None:
        """`last_ms`: when the last heartbeat of each process came."""
        for name, at_ms in last_ms.items():
            self.counts[name] += self.seen_ms.get(name, at_ms) != at_ms
        self.seen_ms = {**last_ms}

    def believes(self, name: str) -> bool:
        return self.counts[name] >= HEARTBEATS_TO_SHOW


async def wait_until_unneeded(
    pool: PoolClient, settings: Settings, lease: Lease, told_to_end: asyncio.Event
) -> None:
    """Return when this batcher was told to end and may leave; GRACEFUL_TERMINATION_TIMEOUT bounds it."""
    await told_to_end.wait()
    batchers, gateways = HeartbeatCount(), HeartbeatCount()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(settings.graceful_termination_timeout):
            while lease.epoch:
                if not await is_needed(pool, lease.holder, batchers, gateways):
                    return
                await asyncio.sleep(settings.heartbeat_s)


async def is_needed(
    pool: PoolClient, own_name: str, batchers: HeartbeatCount, gateways: HeartbeatCount
) -> bool:
    try:
        batchers.look(await pool.processes("batcher"))
        gateways.look(await pool.processes("gateway"))
        names = [*gateways.seen_ms]
        async with pool.redis.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.hmget(pool.keys.gateway(name), ["state", "streams"])
            answers = await pipe.execute()
    except ERRORS:
        return True
    states = [
        GatewayState(state.decode(), int(num_streams or 0), gateways.believes(name))
        for name, (state, num_streams) in zip(names, answers, strict=True)
        if state
    ]
    return must_stay(any(batchers.believes(name) for name in batchers.seen_ms if name != own_name), states)


def must_stay(has_standby: bool, gateways: Sequence[GatewayState]) -> bool:
    """Whether the active batcher must stay. Every gateway is waited for until it is believed: it may have
    been told to end as well, and not have shown it yet.
    """
    if any(gateway.state not in ENDING and not gateway.is_believed for gateway in gateways):
        return True
    return not has_standby and any(
        gateway.state == "draining" and gateway.num_streams for gateway in gateways
    )
