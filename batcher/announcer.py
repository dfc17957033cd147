"""Announcer: tells the directory at an interval what the active batcher knows of its pool."""

import asyncio
import logging
import time
from collections.abc import Collection
from dataclasses import replace
from typing import NoReturn

from batcher.adapters import AdapterKeeper
from batcher.lease import Lease
from batcher.scheduling.replica import Replica
from batcher.scheduling.scheduler import Scheduler
from common.broker.client import CONNECT_TIMEOUT_S, FailureLog, broker_url
from common.broker.directory import DirectoryClient, PoolEntry, address_of
from common.broker.keys import SLEEPER, STARTING
from common.broker.pool_client import PoolClient
from common.process.event_loop import until_beat
from common.settings.settings import Settings

log = logging.getLogger(__name__)


class PoolAnnouncer:
    """Announces the pool while its broker answers: a pool whose broker is down falls silent, whatever the
    directory's does.

    Attributes:
        rival: address of another broker that has a pool of this name; empty without one.
    """

    def __init__(
        self, settings: Settings, pool: PoolClient, directory: DirectoryClient, lease: Lease
    ) -> None:
        self.address = address_of(broker_url(settings))
        self.interval_s = settings.heartbeat_s
        self.pool = pool
        self.directory = directory
        self.lease = lease
        self.rival = ""

    async def run(self, scheduler: Scheduler, adapters: AdapterKeeper) -> NoReturn:
        """Announce what this scheduler has, and the names of adapters, until the epoch is over."""
        failures = FailureLog(log, "telling the directory of this pool")
        while True:
            if time.monotonic() < self.lease.expires_s:
                with failures.caught():
                    async with asyncio.timeout(CONNECT_TIMEOUT_S):
                        await self.announce(scheduler, adapters.names)
            await asyncio.sleep(until_beat(self.interval_s))

    async def announce(self, scheduler: Scheduler, adapters: list[str]) -> None:
        replicas = [replica for replica in scheduler.replicas.values() if not replica.draining]
        waiting = sum(sequence.waiting for sequence in scheduler.sequences.values())
        entry = replace(describe(self.address, replicas, waiting), adapters=adapters)
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
        entry = replace(
            entry, num_loading=len(await self.pool.processes(STARTING)), num_sleepers=len(sleepers)
        )
        if not sleepers:
            return entry
        sleeper, names = self.pool.keys.sleeper(sleepers[0]), ["model_id", "tokenizer_name"]
        model_id, tokenizer_name = await self.pool.redis.hmget(sleeper, names)  # type: ignore[misc]
        return replace(
            entry, model_id=(model_id or b"").decode(), tokenizer_name=(tokenizer_name or b"").decode()
        )


def describe(address: str, replicas: Collection[Replica], waiting: int) -> PoolEntry:
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
    )
