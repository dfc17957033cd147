"""The door for other services: jobs in the stream `submit`, in JSON. The gateways of a pool share them, and
act as their clients.

An entry stays with the gateway that took it until its job has been answered; what a dead gateway held is
taken over by the others.
"""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from typing import Any

from redis.exceptions import ResponseError

from api.errors import ApiError, conflict, internal_error, openai, overloaded, tgi
from api.inference import metrics
from api.inference.admission import PAUSE_S
from api.inference.pool import Pool
from api.jobs import chat, generate
from api.jobs.job import NAME, Job, read
from api.jobs.reply import Reply
from api.jobs.runner import JobRun
from api.json import to_json
from api.offload import offload
from common.broker.client import ERRORS, describe_error, script
from common.broker.keys import RESULT_TTL_MS
from common.process.logs import REQUEST_ID

log = logging.getLogger(__name__)

GROUP = "gateways"
NUM_READ = 16
NUM_CLAIMED = 256
MAX_PENDING = 1_000_000
BLOCK_MS = 1000
TOMBSTONE_MS = 60_000
"""How long a cancel is remembered that came before its job."""


class JobConsumer:
    """The jobs of one gateway.

    Attributes:
        held: entries that are ours until their jobs are answered.
        runs: jobs being served, by id.
    """

    def __init__(self, pool: Pool) -> None:
        self.pool, self.admission, self.settings, self.name = (
            pool,
            pool.admission,
            pool.settings,
            pool.gateway,
        )
        self.redis: Any = pool.redis
        self.keys = pool.keys
        self.take_over_script, self.cancel_script = (
            script(self.redis, "claim_jobs"),
            script(self.redis, "cancel_job"),
        )
        self.held: set[str] = set()
        self.waiting: asyncio.Queue[str] = asyncio.Queue()
        self.turns = asyncio.Semaphore(self.settings.max_concurrent_requests)
        self.runs: dict[str, JobRun] = {}
        self.door = asyncio.Lock()
        self.joined = asyncio.Event()

    async def run(self) -> None:
        """Never returns."""
        async with asyncio.TaskGroup() as self.tasks:
            self.tasks.create_task(self.persist(self.take))
            self.tasks.create_task(self.persist(self.take_over))
            self.tasks.create_task(self.work())

    async def persist(self, verb: Callable[[], Awaitable[None]]) -> None:
        """Does `verb` for ever, whatever the broker or somebody who writes to our stream does."""
        last_error = ""
        while True:
            try:
                await verb()
                last_error = ""
            except ERRORS as error:
                if last_error != describe_error(error):
                    last_error = describe_error(error)
                    log.warning("no jobs: %s", last_error)
                await asyncio.sleep(PAUSE_S)

    # --- taking ---------------------------------------------------------------------------------------------

    async def take(self) -> None:
        """New jobs, as they come, for as long as the broker gives them; and first what it gave us without our
        hearing it.
        """
        await self.join()
        for entry in await self.redis.xpending_range(
            self.keys.submit, GROUP, "-", "+", MAX_PENDING, self.name
        ):
            self.hold(entry["message_id"].decode())
        self.joined.set()
        while True:
            new = await self.entries()
            surplus = await self.surplus() if new else 0
            for entry_id, fields in new[: len(new) - surplus]:
                await self.accept(entry_id, fields)
            for entry_id, fields in new[len(new) - surplus :]:
                await self.reject(entry_id, fields)

    async def join(self) -> None:
        try:
            await self.redis.xgroup_create(self.keys.submit, GROUP, id="0", mkstream=True)
        except ResponseError as error:
            if not str(error).startswith("BUSYGROUP"):
                raise

    async def entries(self) -> list[tuple[str, dict[bytes, bytes]]]:
        answer = await self.redis.xreadgroup(
            GROUP, self.name, {self.keys.submit: ">"}, count=NUM_READ, block=BLOCK_MS
        )
        return [(entry_id.decode(), fields) for _, items in answer for entry_id, fields in items]

    async def surplus(self) -> int:
        """How many of the entries just taken are too many."""
        pending = await self.redis.xpending(self.keys.submit, GROUP)
        return max(0, min(NUM_READ, int(pending["pending"]) - self.settings.submit_limit))

    async def take_over(self) -> None:
        """Looks once for jobs of gateways that are gone."""
        await self.joined.wait()
        for consumer in await self.redis.xinfo_consumers(self.keys.submit, GROUP):
            other = consumer["name"].decode(errors="surrogateescape")
            if other != self.name:
                keys = [self.keys.submit, self.keys.gateway(other)]
                taken = await self.take_over_script(
                    keys=keys, args=[GROUP, consumer["name"], self.name, NUM_CLAIMED]
                )
                if taken:
                    log.warning("%d jobs of gateway %s are taken over", len(taken), other)
                for entry_id in taken:
                    self.hold(entry_id.decode())
        await asyncio.sleep(self.settings.heartbeat_s)

    async def accept(self, entry_id: str, fields: dict[bytes, bytes]) -> None:
        if b"cancel" in fields:  # it does not wait for its turn
            await self.cancel(fields[b"cancel"])
            await self.drop(entry_id)
        else:
            self.hold(entry_id)

    def hold(self, entry_id: str) -> None:
        if entry_id not in self.held:
            self.held.add(entry_id)
            self.waiting.put_nowait(entry_id)

    async def drop(self, entry_id: str) -> None:
        """The entry's job has been answered."""

        async def command() -> None:
            async with self.redis.pipeline() as pipe:
                pipe.xack(self.keys.submit, GROUP, entry_id)
                pipe.xdel(self.keys.submit, entry_id)
                await pipe.execute()

        await self.admission.retry_forever(command)

    async def cancel(self, name: bytes) -> None:
        """Asks for the end of a job, in whoever's hands it is."""
        job_id = name.decode(errors="replace")
        if not re.fullmatch(NAME, job_id):
            log.warning("nothing is called off: %.100r is no id of a job", name)
            return
        num_requests = await self.cancel_script(keys=[self.keys.job(job_id)], args=[TOMBSTONE_MS])
        for i in range(num_requests):
            await self.admission.cancel(f"{job_id}#{i}")

    # --- serving --------------------------------------------------------------------------------------------

    async def work(self) -> None:
        """Starts what waits; as many at once as the pool could have."""
        while True:
            await self.turns.acquire()
            self.tasks.create_task(self.finish(await self.waiting.get()))

    async def finish(self, entry_id: str) -> None:
        try:
            for _, fields in await self.admission.retry_forever(
                lambda: self.redis.xrange(self.keys.submit, entry_id, entry_id)
            ):
                if b"cancel" in fields:
                    await self.cancel(fields[b"cancel"])
                else:
                    await self.serve(await self.read(entry_id, fields))
            await self.drop(entry_id)
        except Exception:
            log.exception("entry %s stays in the stream of jobs", entry_id)
        finally:
            self.held.discard(entry_id)
            self.turns.release()

    async def read(self, entry_id: str, fields: dict[bytes, bytes]) -> Job:
        return await offload(
            sum(map(len, fields.values())), lambda: read(entry_id, fields, self.settings.payload_limit)
        )

    async def serve(self, job: Job) -> None:
        """Returns when the job has been answered."""
        REQUEST_ID.set(job.id)
        metrics.count_arrival()
        reply = Reply(self.redis, self.keys, self.admission.retry_forever, job)
        match await reply.register():
            case "conflict":
                await self.refuse(job, conflict("job"), job.entry_id)
            case "spoiled":
                log.error("job %s: the key %s is none of ours", job.id, self.keys.job(job.id))
                await self.refuse(job, internal_error("the record of this job was overwritten"), job.id)
            case "live" if (run := self.runs.get(job.id)) is not None:
                run.join(reply)
                await run.ended.wait()
            case "live":
                await self.lead(job, reply)

    async def lead(self, job: Job, reply: Reply) -> None:
        run = self.runs[job.id] = JobRun(self.pool, job, self.door)
        run.join(reply)
        try:
            if job.is_chat:
                await run.run(chat.accept, openai)
            else:
                await run.run(generate.accept, tgi)
        finally:
            del self.runs[job.id]  # with the last reply: whoever comes now is not heard by this run any more
            await run.detach()

    async def reject(self, entry_id: str, fields: dict[bytes, bytes]) -> None:
        """One job too many."""
        log.warning(
            "job %s is refused: SUBMIT_LIMIT (%d) jobs have not ended", entry_id, self.settings.submit_limit
        )
        metrics.count_arrival()
        metrics.count_error(429, "overloaded")
        job = await self.read(entry_id, fields)
        known = await self.redis.exists(self.keys.job(job.id))
        await self.refuse(job, overloaded(), entry_id if known else job.id)
        await self.drop(entry_id)

    async def refuse(self, job: Job, error: ApiError, result_id: str) -> None:
        """An error for this entry alone: what is known of a job with its id stays as it is."""
        body = to_json((openai if job.is_chat else tgi)(error)[1])

        async def command() -> None:
            async with self.redis.pipeline() as pipe:
                pipe.set(self.keys.result(result_id), body, px=RESULT_TTL_MS)
                if job.reply_to:
                    pipe.publish(self.keys.channel(job.reply_to), body)
                await pipe.execute()

        await self.admission.retry_forever(command)
