"""Batcher process: stands by until the lease is free, then is the active batcher until it loses the lease."""

import asyncio
import logging
import signal
import sys
from typing import NoReturn

import uvloop

from batcher.announcer import PoolAnnouncer
from batcher.lease import Lease, LeaseLost, WritesLost, wait_until_unneeded
from batcher.loop import Batcher
from batcher.scheduling.scheduler import Scheduler
from common import tracing
from common.broker.directory import DirectoryClient
from common.broker.heartbeat import Heartbeat
from common.broker.keys import LEASE_S
from common.broker.pool_client import PoolClient
from common.metrics.exposition import publishing_metrics
from common.process.event_loop import collect_garbage, run_until_one_ends
from common.process.startup import configure_process, exit_when_unservable, start_process
from common.settings.settings import Settings

log = logging.getLogger(__name__)


async def serve(settings: Settings, incarnation: str) -> None:
    """Run one batcher until SIGTERM. Raises LeaseLost."""
    pool = PoolClient.connect(settings)
    lease = Lease(pool, incarnation, LEASE_S)
    announcer = PoolAnnouncer(settings, pool, DirectoryClient.connect(settings, pool.redis), lease)
    told_to_end = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told_to_end.set)
    await run_until_one_ends(
        run_batcher(settings, pool, lease, announcer, told_to_end),
        wait_until_unneeded(pool, settings, lease, told_to_end),
    )
    await lease.release()
    await Heartbeat(pool, "batcher", incarnation, settings.worker_ttl_s).remove_in_time()


async def run_batcher(
    settings: Settings,
    pool: PoolClient,
    lease: Lease,
    announcer: PoolAnnouncer,
    told_to_end: asyncio.Event,
) -> NoReturn:
    """Be active, one epoch after another, until the lease is lost (raises LeaseLost)."""
    while True:
        epoch = await stand_by(settings, pool, lease)
        async with publishing_metrics(pool):
            batcher = Batcher(settings, pool, lease, epoch)
            try:
                await run_until_one_ends(
                    lease.renew_forever(),
                    batcher.inbox.watch(pool.keys.requests),
                    batcher.run(),
                    announcer.run(batcher.scheduler, batcher.housekeeping.adapters),
                    close_when_told(batcher.scheduler, told_to_end),
                    collect_garbage(batcher.scheduler.num_live),
                )
            except WritesLost as error:
                log.warning("epoch %d is over: %s", epoch, error)
            finally:
                batcher.close()


async def close_when_told(scheduler: Scheduler, told_to_end: asyncio.Event) -> None:
    """When this process is told to end, let requests start on workers that end as well. Never returns."""
    await told_to_end.wait()
    scheduler.workers.set_closing()
    await asyncio.Future()


async def stand_by(settings: Settings, pool: PoolClient, lease: Lease) -> int:
    """Wait for the lease, sending heartbeats meanwhile. Return the new epoch."""
    heartbeat = Heartbeat(pool, "batcher", lease.holder, settings.worker_ttl_s)
    await run_until_one_ends(
        lease.acquire(), heartbeat.send_forever(settings.heartbeat_s, lambda: {"waiting": 0, "rows": 0})
    )
    return int(lease.epoch)


def main() -> None:
    identity = start_process("batcher", "b0")
    with exit_when_unservable():
        settings = Settings.read([])
        configure_process(identity, settings)
        with tracing.exporting(settings, identity.incarnation):
            run(settings, identity.incarnation)


def run(settings: Settings, incarnation: str) -> None:
    try:
        uvloop.run(serve(settings, incarnation))
    except LeaseLost as error:
        log.warning("lease lost: %s", error)
        sys.exit(1)
