"""One batcher process: stands by until the lease is free, then is the active one until it loses it."""

import asyncio
import logging
import os
import secrets
import signal
import sys

import setproctitle
import uvloop
from redis.asyncio import Redis

from batcher.lease import Lease, LeaseLost
from batcher.loop import Batcher
from common import broker, lifeline, logs
from common.keys import Keys
from common.settings import Settings, exit_when_unservable

log = logging.getLogger(__name__)
LEASE_S = 2.0


async def serve(settings: Settings, incarnation: str) -> None:
    """Returns after SIGTERM. Raises LeaseLost."""
    redis = broker.connect(settings.redis_url or "")
    keys = Keys(settings.pool)
    lease = Lease(redis, keys, incarnation, LEASE_S)
    working = asyncio.create_task(work(settings, redis, keys, lease))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, working.cancel)
    try:
        await working
    except asyncio.CancelledError:
        await lease.give_back()


async def work(settings: Settings, redis: Redis, keys: Keys, lease: Lease) -> None:
    epoch = await lease.take()
    await Batcher(settings, redis, keys, lease, epoch).run()


def main() -> None:
    lifeline.die_with_parent()
    name = os.environ.get("PROCESS_NAME", "b0")
    with exit_when_unservable():
        settings = Settings.read([])
    setproctitle.setproctitle(f"tokenfleet batcher {name}")
    logs.set_up(name, settings.log_level)
    try:
        uvloop.run(serve(settings, os.environ.get("INCARNATION") or f"{name}-{secrets.token_hex(4)}"))
    except LeaseLost as error:
        log.warning("lease lost: %s", error)
        sys.exit(1)
