"""One batcher process: stands by until the lease is free, then is the active one until it loses it."""

import asyncio
import logging
import signal
import sys

import uvloop
from redis.asyncio import Redis

from batcher.lease import Lease, LeaseLost
from batcher.loop import Batcher
from common.broker import client
from common.broker.keys import Keys
from common.metrics.aggregate import publishing_metrics
from common.process.heartbeat import Heartbeat
from common.process.startup import configure_process, start_process
from common.settings.settings import Settings, exit_when_unservable

log = logging.getLogger(__name__)
LEASE_S = 2.0


async def serve(settings: Settings, incarnation: str) -> None:
    """Returns after SIGTERM. Raises LeaseLost."""
    redis = client.connect(client.broker_url(settings))
    keys = Keys(settings.pool)
    lease = Lease(redis, keys, incarnation, LEASE_S)
    working = asyncio.create_task(work(settings, redis, keys, lease))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, working.cancel)
    try:
        await working
    except asyncio.CancelledError:
        await lease.give_back()


async def work(settings: Settings, redis: Redis, keys: Keys, lease: Lease) -> None:
    epoch = await stand_by(settings, redis, keys, lease)
    async with publishing_metrics(redis, keys):
        await Batcher(settings, redis, keys, lease, epoch).run()


async def stand_by(settings: Settings, redis: Redis, keys: Keys, lease: Lease) -> int:
    """Returns our epoch, once the lease is ours; people see meanwhile that we are there."""
    sign = Heartbeat(redis, keys, "batcher", lease.who, settings.worker_ttl_s)
    showing = asyncio.create_task(sign.send_forever(settings.heartbeat_s, lambda: {"waiting": 0, "rows": 0}))
    try:
        return await lease.take()
    finally:
        showing.cancel()


def main() -> None:
    own = start_process("batcher", "b0")
    with exit_when_unservable():
        settings = Settings.read([])
        configure_process(own, settings)
    try:
        uvloop.run(serve(settings, own.incarnation))
    except LeaseLost as error:
        log.warning("lease lost: %s", error)
        sys.exit(1)
