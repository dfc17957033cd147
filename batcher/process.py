"""Batcher process: stands by until the lease is free, then is the active batcher until it loses the lease.
All the while it tells the directory what the active batcher knows of its pool.
"""

import asyncio
import logging
import signal
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import uvloop

from batcher.housekeeping import AdapterKeeper
from batcher.lease import Lease, LeaseLost, WritesLost, wait_until_unneeded
from batcher.loop import Batcher
from batcher.scheduling.replica import Replica
from batcher.scheduling.scheduler import Scheduler
from common.broker.client import CONNECT_TIMEOUT_S, FailureLog, broker_url
from common.broker.directory import DirectoryClient, PoolEntry, address_of
from common.broker.heartbeat import Heartbeat
from common.broker.keys import LEASE_S, SLEEPER, STARTING
from common.broker.pool_client import PoolClient
from common.metrics.exposition import publishing_metrics
from common.process.event_loop import collect_garbage, run_until_one_ends, until_beat
from common.process.startup import configure_process, exit_when_unservable, exporting_spans, start_process
from common.settings.settings import Settings

log = logging.getLogger(__name__)


@dataclass(eq=False)
class PoolAnnouncer:
    """Announces the pool while its broker answers: a pool whose broker is down falls silent, whatever the
    directory's does.

    Attributes:
        rival: address of another broker that has a pool of this name; empty without one.
    """

    settings: Settings
    pool: PoolClient
    directory: DirectoryClient
    lease: Lease
    rival: str = ""

    async def run(self, scheduler: Scheduler, adapters: AdapterKeeper) -> NoReturn:
        """Announce what this scheduler has, and the names of adapters, until the epoch is over."""
        failures = FailureLog(log, "telling the directory of this pool")
        while True:
            if time.monotonic() < self.lease.expires_s:
                with failures.caught():
                    async with asyncio.timeout(CONNECT_TIMEOUT_S):
                        await self.announce(scheduler, adapters.names)
            await asyncio.sleep(until_beat(self.settings.heartbeat_s))

    async def announce(self, scheduler: Scheduler, adapters: list[str]) -> None:
        replicas = [replica for replica in scheduler.replicas.values() if not replica.draining]
        waiting = sum(sequence.waiting for sequence in scheduler.sequences.values())
        entry = describe(address_of(broker_url(self.settings)), replicas, waiting, adapters)
        if not replicas:
            entry = await self.look_for_others(entry)
        rival = await self.directory.publish(self.pool.keys.pool, entry)
        if rival and rival != self.rival:
            log.error(
                "POOL: the pool %r of the broker at %s is in the directory already, so other gateways do not "
                "find this one: give it another name",
                self.pool.keys.pool,
                rival,
            )
        self.rival = rival

    async def look_for_others(self, entry: PoolEntry) -> PoolEntry:
        """The entry of a pool without a ready worker, with those that load, and that serve it in its turn."""
        sleepers = [*await self.pool.processes(SLEEPER)]
        known: dict[str, Any] = {}
        if sleepers:
            names = ["model_id", "tokenizer_name"]
            found = await self.pool.redis.hmget(self.pool.keys.sleeper(sleepers[0]), names)  # type: ignore[misc]
            known = {name: text.decode() for name, text in zip(names, found, strict=True) if text}
        num_loading = len(await self.pool.processes(STARTING))
        return replace(entry, num_loading=num_loading, num_sleepers=len(sleepers), **known)


def describe(address: str, replicas: Collection[Replica], waiting: int, adapters: list[str]) -> PoolEntry:
    """The pool's entry, from its workers; those that drain, and so take no new requests, are left out."""
    workers = [replica.capacity for replica in replicas]
    return PoolEntry(
        address=address,
        models=[*dict.fromkeys(name for worker in workers for name in worker.served_names)],
        model_id=next((worker.model_id or worker.model for worker in workers), ""),
        tokenizer_name=next((worker.tokenizer_name for worker in workers), ""),
        num_ready=len(workers),
        waiting=waiting,
        rows=sum(len(replica.rows) for replica in replicas),
        capacity=sum(replica.limits.max_batch_size for replica in replicas),
        adapters=adapters,
    )


async def serve(settings: Settings, incarnation: str) -> None:
    """Run one batcher until SIGTERM or SIGINT. Raises LeaseLost."""
    pool = PoolClient.connect(settings)
    lease = Lease(pool, incarnation, LEASE_S)
    announcer = PoolAnnouncer(settings, pool, DirectoryClient.connect(settings, pool.redis), lease)
    told_to_end = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, told_to_end.set)
    await run_until_one_ends(
        run_batcher(settings, pool, lease, announcer, told_to_end),
        wait_until_unneeded(pool, settings, lease, told_to_end),
    )
    await lease.release()
    await Heartbeat(pool, "batcher", incarnation, settings.worker_ttl_s).remove_in_time()


async def run_batcher(
    settings: Settings, pool: PoolClient, lease: Lease, announcer: PoolAnnouncer, told_to_end: asyncio.Event
) -> NoReturn:
    """Be active, one epoch after another, until the lease is lost (raises LeaseLost)."""
    while True:
        epoch = await stand_by(settings, pool, lease)
        async with publishing_metrics(pool):
            batcher = Batcher(settings, pool, lease, epoch)
            try:
                await run_until_one_ends(
                    lease.renew_forever(),
                    batcher.run(),
                    announcer.run(batcher.scheduler, batcher.housekeeping.adapters),
                    close_when_told(batcher.scheduler, told_to_end),
                    collect_garbage(batcher.scheduler.sequences.__len__),
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
        with exporting_spans(settings, identity.incarnation):
            try:
                uvloop.run(serve(settings, identity.incarnation))
            except LeaseLost as error:
                log.warning("lease lost: %s", error)
                sys.exit(1)
