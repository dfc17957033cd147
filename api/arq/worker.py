"""The arq worker: its jobs, and arq's own limits set to the fleet's."""

import asyncio
import contextlib
import logging
from typing import Any

from arq.connections import ArqRedis
from arq.constants import abort_jobs_ss, in_progress_key_prefix, job_key_prefix
from arq.worker import Function, Worker, func
from redis.asyncio import Redis

from api.arq.client import ArqClient
from api.arq.serializer import pack, unpacking
from common.broker.client import ERRORS, describe_error
from common.broker.keys import RESULT_TTL_MS, Keys
from common.settings.settings import Settings

log = logging.getLogger(__name__)

POLL_S = 0.1
PAUSE_S = 0.5
HEALTH_S = 10
MARGIN_S = 10.0
"""The fleet ends a request at its deadline, and arq a job a little later."""
MAX_TRIES = 1000
"""To try again costs nothing: the job is in the fleet's hands. Only a job that ends its worker again and
again is given up.
"""


class JobWorker(Worker):
    """An arq worker that outlives its broker's absence and strangers' keys, and whose jobs are soon taken up
    by others when it dies.
    """

    def __init__(self, redis: Redis, settings: Settings) -> None:
        keys = Keys(settings.pool)
        unpack = unpacking(settings.payload_limit)
        super().__init__(
            jobs(self.ask),
            queue_name=keys.arq_queue,
            redis_pool=ArqRedis(redis.connection_pool, pack, unpack, keys.arq_queue),
            max_jobs=settings.max_jobs,
            job_timeout=settings.request_timeout_s + MARGIN_S,
            max_tries=MAX_TRIES,
            keep_result=RESULT_TTL_MS / 1000,
            poll_delay=POLL_S,
            health_check_interval=HEALTH_S,
            allow_abort_jobs=True,
            log_results=False,
            job_serializer=pack,
            job_deserializer=unpack,
        )
        self.client = ArqClient(redis, keys)
        self.in_progress_timeout_s = settings.worker_ttl_s

    async def ask(self, job_id: str, content: dict[str, Any]) -> Any:
        """The fleet's answer. An aborted job is called off; one whose worker stops goes on, and another
        worker waits for it.
        """
        try:
            return await self.client.ask(job_id, content)
        except asyncio.CancelledError:
            if job_id in self.aborting_tasks:
                await self.client.cancel(job_id)
            raise

    # --- arq's verbs ----------------------------------------------------------------------------------------

    async def main(self) -> None:
        """Never returns."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.client.run())
            tasks.create_task(self.persist())

    async def persist(self) -> None:
        """arq's own loop, again and again."""
        last_error = ""
        while True:
            try:
                await super().main()
            except ERRORS as error:
                if last_error != describe_error(error):
                    last_error = describe_error(error)
                    log.warning("no jobs: %s", last_error)
                await asyncio.sleep(PAUSE_S)
            except UnicodeDecodeError:
                for key in (self.queue_name, abort_jobs_ss):
                    await self.sweep(key)

    async def sweep(self, key: str) -> None:
        """Drops what nobody can have queued with arq: names that are not UTF-8."""
        with contextlib.suppress(*ERRORS):
            for name in await self.pool.zrange(key, 0, -1):
                if name.decode(errors="ignore").encode() != name:
                    log.error("%r is dropped from %s: it is no job's name", name, key)
                    await self.pool.zrem(key, name)

    async def heart_beat(self) -> None:
        """Says that the jobs are still ours: should we die, others take them up when that has expired."""
        await super().heart_beat()
        async with self.pool.pipeline(transaction=False) as pipe:
            for job_id in self.job_tasks:
                pipe.pexpire(in_progress_key_prefix + job_id, round(self.in_progress_timeout_s * 1000))
            await pipe.execute()

    async def start_jobs(self, job_ids: list[bytes]) -> None:
        """One by one: arq does not give back the place that it had taken for a job when the broker fails it."""
        for job_id in job_ids:
            try:
                await super().start_jobs([job_id])
            except (*ERRORS, UnicodeDecodeError):
                self.job_counter -= 1
                self.sem.release()
                raise

    async def run_job(self, job_id: str, score: int) -> None:
        """A job whose key somebody wrote to in another way than arq spoils itself and no other."""
        try:
            if await self.pool.type(job_key_prefix + job_id) in (b"string", b"none"):
                await super().run_job(job_id, score)
            else:
                log.error("job %s is dropped: its key is none of arq's", job_id)
                await self.pool.zrem(self.queue_name, job_id)
        except ERRORS as error:
            log.warning("job %s comes again: %s", job_id, describe_error(error))


def jobs(ask: Any) -> list[Function]:
    """What arq clients can enqueue; `ask(job_id, content)` gives the fleet's answer."""

    async def generate(ctx: dict[str, Any], inputs: str, parameters: dict[str, Any] | None = None) -> Any:
        return await ask(ctx["job_id"], {"inputs": inputs, "parameters": parameters})

    async def chat(ctx: dict[str, Any], messages: list[Any], **fields: Any) -> Any:
        return await ask(ctx["job_id"], {"messages": messages, "parameters": fields})

    return [func(generate, name="generate"), func(chat, name="chat")]
