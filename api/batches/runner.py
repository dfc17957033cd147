"""Batch runner: takes the most urgent batches of the pool, and gives them up when more urgent ones come.

Each batch has one writer among the gateways; when its lease expires, another one goes on.
"""

import asyncio
import contextlib
import logging
from collections import Counter

from api.batches.batch import choose_batches, needed_files, read_batch
from api.batches.lines import LineFault
from api.batches.run import LEASE_MS, MAX_TRIES, BatchRun, WriterReplaced
from api.batches.store import FileStore
from api.event_loop import repeat_forever
from api.jobs import scripts as job_scripts
from api.jobs.consumer import JobConsumer
from common.broker.client import ERRORS
from common.process.event_loop import until_beat

log = logging.getLogger(__name__)

MAX_RUNNING = 4
"""Batches of the pool that are served at once."""
POLL_S = 1.0
SWEEP_S = 600.0
CANNOT_GO_ON = LineFault("server_error", f"The batch could not go on, {MAX_TRIES} times at the same line.")


class BatchRunner:
    """The batches that this gateway writes.

    Attributes:
        runs: by owner and id.
        faults: how often a batch could not go on, by the last line that it had answered, owner and id.
    """

    def __init__(self, store: FileStore, consumer: JobConsumer) -> None:
        self.store = store
        self.consumer = consumer
        self.client = consumer.pool.client
        self.runs: dict[str, asyncio.Task[None]] = {}
        self.faults = Counter[tuple[int, str]]()

    async def run(self) -> None:
        """Never returns."""
        sweep = asyncio.create_task(repeat_forever(self.delete_expired, "deleting expired files"))
        try:
            await repeat_forever(self.look, "looking for batches")
        finally:
            tasks = [sweep, *self.runs.values()]
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def look(self) -> None:
        """Take the batches that are to be served and have no writer; give up those that are not."""
        await asyncio.sleep(until_beat(POLL_S))
        redis, keys = self.client.redis, self.client.keys
        members = [member.decode() for member in await redis.zrange(keys.live_batches, 0, -1)]
        owners = [(member.rpartition(" ")[0], member) for member in members]
        chosen = choose_batches(owners, MAX_RUNNING)
        for member in self.runs.keys() - {*chosen}:
            self.runs[member].cancel()
        for key in [*self.faults]:
            if key[1] not in members:
                del self.faults[key]
        for member in chosen:
            if member not in self.runs:
                await self.claim(member)

    async def claim(self, member: str) -> None:
        """Write a batch, if nobody else does. One that cannot be read has failed."""
        batch_id = member.rpartition(" ")[2]
        call = job_scripts.claim_batch(self.client.keys, batch_id, member, lease_ms=LEASE_MS)
        epoch = await self.client.run(call)
        if not epoch:
            return
        if (batch := await read_batch(self.client, batch_id)) is None:
            log.error("batch %s cannot be read: it has failed", batch_id)
            failed = {"status": "failed"}
            await self.client.run(
                job_scripts.write_batch(
                    self.client.keys, batch_id, member, failed, epoch=epoch, lease_ms=0, ended=True
                )
            )
        else:
            task = self.runs[member] = asyncio.create_task(
                self.serve(BatchRun(self.store, self.consumer, batch, epoch))
            )
            task.add_done_callback(lambda _: self.runs.pop(member, None))

    async def serve(self, run: BatchRun) -> None:
        """Serve a batch until it has ended, or it is another gateway's. After a fault it begins again after
        its last part; where it could not go on twice, it ends.
        """
        member, line = run.batch.member, run.next_line
        times = self.faults[line, member]
        try:
            await run.run(CANNOT_GO_ON if times >= MAX_TRIES else None)
        except WriterReplaced:
            log.warning("batch %s: another gateway writes it", run.batch.id)
        except asyncio.CancelledError:
            await self.give_up(run)
            raise
        except Exception:
            log.exception("batch %s could not go on after line %d", run.batch.id, line)
            self.faults[line, member] += 1
            await self.give_up(run)

    async def give_up(self, run: BatchRun) -> None:
        """Leave a batch to the next who looks; if the broker does not answer, its lease expires."""
        call = job_scripts.write_batch(
            self.client.keys,
            run.batch.id,
            run.batch.member,
            {},
            epoch=run.epoch,
            lease_ms=0,
            ended=False,
        )
        with contextlib.suppress(*ERRORS):
            await self.client.run(call)

    async def delete_expired(self) -> None:
        """Delete the files whose time is over, by the broker's clock."""
        await asyncio.sleep(until_beat(SWEEP_S))
        now_s = await self.client.read_time()
        await self.store.delete_expired(now_s, await needed_files(self.client))
