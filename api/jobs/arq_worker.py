"""Job worker: the process of an arq worker that runs its functions as jobs of the fleet. It serialises them
by msgpack and never reads a pickle, because any program may write to the keys. Only the error of a job that
was pickled is one, so that its client can read it. It submits the jobs to the fleet as any other service
does, and waits for their answers.
"""

import asyncio
import contextlib
import json
import logging
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgpack
import orjson
import uvloop
from arq.connections import ArqRedis
from arq.constants import abort_jobs_ss, in_progress_key_prefix, job_key_prefix
from arq.jobs import SerializationError, deserialize_job_raw
from arq.worker import Function, Worker, func

from api.errors import invalid, tgi
from api.event_loop import attempt, repeat_forever, retry_forever
from api.json import to_json
from common.broker.client import ERRORS, SerialClient, describe_error
from common.broker.heartbeat import Heartbeat
from common.broker.keys import RESULT_TTL_MS
from common.broker.pool_client import PoolClient
from common.process.event_loop import until_beat
from common.process.startup import READY, configure_process, exit_when_unservable, start_process
from common.settings.settings import Settings

log = logging.getLogger(__name__)

MAX_JOBS = 256
"""arq's jobs that one job worker waits for at once."""

POLL_S, IDLE_POLL_S = 0.1, 0.25
"""How often a worker looks for a job: while it runs one, and while it runs none."""
HEALTH_S = 10
MARGIN_S = 10.0
"""arq ends a job this much later than the fleet ends its request."""
MAX_TRIES = 1000
"""A retry costs nothing, because the fleet keeps the job. Only a job that kills its worker again and again is
given up.
"""
LAST_MS = 32_503_680_000_000
"""The year 3000: arq makes a date of a time in ms."""
TERMS = ("model", "tenant", "deadline_ms", "traceparent", "webhook", "api_key")
"""Arguments of `chat` that are fields of the job, not of its chat."""

Packed = dict[str, Any]
ANSWERS_S = 0.1
"""How often answers are looked for."""


# --- the fleet's client -------------------------------------------------------------------------------------


class JobFailed(Exception):
    """A job that was answered with an error: `str()` is the error object of HTTP, in JSON."""


def invalid_job(why: str) -> JobFailed:
    return JobFailed(to_json(tgi(invalid(why))[1]).decode())


@dataclass(eq=False, slots=True)
class WaitingJob:
    """A job whose answer has not come; `entry_id` names its entry in `submit`."""

    job_id: str
    fields: dict[str, Any]
    entry_id: str
    answer: asyncio.Future[bytes]


class ArqClient:
    """Submits jobs, and polls for the answers to all of them at once.

    Attributes:
        submitted: set while jobs wait.
    """

    def __init__(self, client: PoolClient) -> None:
        self.redis: Any = client.redis
        self.keys = client.keys
        self.waiting: set[WaitingJob] = set()
        self.submitted = asyncio.Event()

    async def run_job(self, job_id: str, content: dict[str, Any], key: Mapping[str, str]) -> Any:
        """The answer to a job; a job that was submitted before is joined. `key`: the entry's field with an
        API key, if there is one. Raises JobFailed.
        """
        try:
            data = json.dumps(content | {"id": job_id}, allow_nan=False)
        except (RecursionError, TypeError, ValueError) as error:
            raise invalid_job(f"the arguments must be JSON: {error}") from error
        fields = {"job": data, **key}
        entry_id = await self.add_entry(fields)
        job = WaitingJob(job_id, fields, entry_id, asyncio.get_running_loop().create_future())
        self.waiting.add(job)
        self.submitted.set()
        try:
            result = orjson.loads(await job.answer)
        finally:
            self.waiting.remove(job)
        if "error" in result:
            raise JobFailed(orjson.dumps(result).decode())
        return result

    async def cancel(self, job_id: str, key: Mapping[str, str]) -> None:
        await self.add_entry({"cancel": job_id, **key})

    async def add_entry(self, fields: dict[str, Any]) -> str:
        """Add an entry to `submit`, once the broker answers. Returns its id."""
        entry_id: bytes = await attempt(lambda: self.redis.xadd(self.keys.submit, fields), retry_forever)
        return entry_id.decode()

    async def run(self) -> None:
        """Never returns."""
        await repeat_forever(self.poll, "polling for answers")

    async def poll(self) -> None:
        """Wait until there are jobs, then settle those whose entries have left `submit`."""
        if not self.waiting:
            self.submitted.clear()
            await self.submitted.wait()
        await asyncio.sleep(ANSWERS_S)
        waiting = list(self.waiting)
        async with self.redis.pipeline(transaction=False) as pipe:
            for job in waiting:
                pipe.xrange(self.keys.submit, job.entry_id, job.entry_id)
            entries = await pipe.execute()
        for job, entry in zip(waiting, entries, strict=True):
            if not entry:
                await self.settle(job)

    async def settle(self, job: WaitingJob) -> None:
        """Hand out the answer to a job, that to its entry first. If there is none, the broker has lost the
        job: it is submitted again. While the entry was there, an answer may have been that of another job
        with this id.
        """
        names = [self.keys.result(name) for name in (job.entry_id, job.job_id)]
        own, shared = await self.redis.mget(names)
        if not (own or shared):
            log.warning("the broker has lost job %s: it is submitted again", job.job_id)
            job.entry_id = await self.add_entry(job.fields)
        elif not job.answer.done():
            job.answer.set_result(own or shared)


# --- worker ------------------------------------------------------------------------------------------------


class JobWorker(Worker):
    """An arq worker that survives an absent broker and malformed keys. When it dies, other workers soon take
    its jobs.
    """

    def __init__(self, client: PoolClient, settings: Settings) -> None:
        unpack = make_unpack(settings.payload_limit)
        super().__init__(
            job_functions(self.run_in_fleet),
            queue_name=client.keys.arq_queue,
            redis_pool=ArqRedis(client.redis.connection_pool, pack, unpack, client.keys.arq_queue),
            max_jobs=MAX_JOBS,
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
        self.client = ArqClient(client)
        self.idle_client = SerialClient(client.redis)
        self.in_progress_timeout_s = settings.worker_ttl_s

    async def run_in_fleet(self, job_id: str, content: dict[str, Any]) -> Any:
        """The fleet's answer. An aborted job is cancelled. The job of a worker that stops goes on, and
        another worker waits for it.
        """
        if "not_before" in content:
            raise invalid_job("`not_before` is no argument: use arq's `_defer_until` or `_defer_by`")
        api_key = content.pop("api_key", None)
        key = {"api_key": api_key} if isinstance(api_key, str) else {}
        try:
            return await self.client.run_job(job_id, content, key)
        except asyncio.CancelledError:
            if job_id in self.aborting_tasks:
                await self.client.cancel(job_id, key)
            raise

    # --- overrides of arq's methods -------------------------------------------------------------------------

    async def main(self) -> None:
        """Never returns."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.client.run())
            tasks.create_task(repeat_forever(self.run_arq, "reading the queue of arq"))

    async def run_arq(self) -> None:
        """Run arq's own loop until a malformed name ends it; drop that name."""
        try:
            await super().main()
        except UnicodeDecodeError:
            for key in (self.queue_name, abort_jobs_ss):
                await self.drop_malformed(key)

    async def _poll_iteration(self) -> None:
        """Poll as arq does if there is a job or an abort. Otherwise one command does: arq's three, ten times
        a second, are most of what a worker without jobs costs.
        """
        if self.tasks or await self.idle_client.execute("EXISTS", self.queue_name, abort_jobs_ss):
            await super()._poll_iteration()
            if not self.tasks:
                await self.drop_aborts()
        else:
            await self.heart_beat()
            await asyncio.sleep(until_beat(IDLE_POLL_S))

    async def drop_malformed(self, key: str) -> None:
        """Drop names that are not UTF-8: arq did not queue them."""
        with contextlib.suppress(*ERRORS):
            for name in await self.pool.zrange(key, 0, -1):
                if name.decode(errors="ignore").encode() != name:
                    log.error("%r is dropped from %s: it is not the name of a job", name, key)
                    await self.pool.zrem(key, name)

    async def drop_aborts(self) -> None:
        """Drop aborts of jobs that are not there, so that nobody polls for them."""
        for name in await self.pool.zrange(abort_jobs_ss, 0, -1):
            if not await self.pool.exists(job_key_prefix + name.decode()):
                await self.pool.zrem(abort_jobs_ss, name)

    async def drop_earlier_abort(self, job_id: str) -> None:
        """Drop an abort that was sent before this job was queued: it was that of another job with its id."""
        sent_ms = await self.pool.zscore(abort_jobs_ss, job_id)
        if sent_ms is None or not (data := await self.pool.get(job_key_prefix + job_id)):
            return
        with contextlib.suppress(SerializationError):
            *_, queued_ms = deserialize_job_raw(data, deserializer=self.job_deserializer)
            if sent_ms <= queued_ms:
                await self.pool.zrem(abort_jobs_ss, job_id)

    async def heart_beat(self) -> None:
        """Renew the claim on this worker's jobs. When the worker dies the claim expires, and others take
        them.
        """
        await super().heart_beat()
        async with self.pool.pipeline(transaction=False) as pipe:
            for job_id in self.job_tasks:
                pipe.psetex(in_progress_key_prefix + job_id, round(self.in_progress_timeout_s * 1000), b"1")
            await pipe.execute()

    async def start_jobs(self, job_ids: list[bytes]) -> None:
        """Start jobs one by one, because arq does not release the slot of a job whose start fails. A job that
        runs here is not started again if its claim has expired while this process was stopped.
        """
        for job_id in job_ids:
            if job_id.decode(errors="replace") in self.tasks:
                continue
            try:
                await super().start_jobs([job_id])
            except (*ERRORS, UnicodeDecodeError):
                self.job_counter -= 1
                self.sem.release()
                raise

    async def run_job(self, job_id: str, score: int) -> None:
        """Run a job. A job whose key has another type than arq's is dropped, and harms no other. A worker
        that is told to end, ends in order, even while a job's keys are read or written.
        """
        try:
            if await self.pool.type(job_key_prefix + job_id) in (b"string", b"none"):
                await self.drop_earlier_abort(job_id)
                await super().run_job(job_id, score)
            else:
                log.error("job %s is dropped: arq did not write its key", job_id)
                await self.pool.zrem(self.queue_name, job_id)
        except asyncio.CancelledError:
            log.info("job %s is left to another worker", job_id)
        except ERRORS as error:
            log.warning("job %s is tried again: %s", job_id, describe_error(error))


def job_functions(run_in_fleet: Any) -> list[Function]:
    """The functions that arq clients can enqueue; `run_in_fleet(job_id, content)` gives the answer."""

    async def generate(
        ctx: dict[str, Any],
        inputs: str | None = None,
        parameters: dict[str, Any] | None = None,
        **terms: Any,
    ) -> Any:
        return await run_in_fleet(ctx["job_id"], {"inputs": inputs, "parameters": parameters, **terms})

    async def chat(ctx: dict[str, Any], messages: list[Any] | None = None, **fields: Any) -> Any:
        return await run_in_fleet(ctx["job_id"], {"messages": messages, **with_terms(fields)})

    async def embed(ctx: dict[str, Any], input: Any = None, **fields: Any) -> Any:
        return await run_in_fleet(ctx["job_id"], {"input": input, **with_terms(fields)})

    async def rerank(ctx: dict[str, Any], query: Any = None, documents: Any = None, **fields: Any) -> Any:
        prompt = {"query": query, "documents": documents}
        return await run_in_fleet(ctx["job_id"], {**prompt, **with_terms(fields)})

    return [
        func(generate, name="generate"),
        func(chat, name="chat"),
        func(embed, name="embed"),
        func(rerank, name="rerank"),
    ]


def with_terms(fields: dict[str, Any]) -> dict[str, Any]:
    """Arguments that are fields of a job, and the others, its parameters."""
    terms = {name: fields.pop(name) for name in TERMS if name in fields}
    return {"parameters": fields, **terms}


# --- serializer ---------------------------------------------------------------------------------------------


class PickledJob(ValueError):
    """A job of a client with arq's default serializer."""


def pack(data: Packed) -> bytes:
    """Serialise a job or its result; an exception becomes its text. The error of a job that was pickled is
    pickled.
    """
    cause = getattr(data.get("r"), "__cause__", None)
    if isinstance(cause, PickledJob):
        return pickle.dumps(data | {"r": ValueError(str(cause))})
    packed: bytes = msgpack.packb(data, default=exception_text)
    return packed


def exception_text(value: object) -> str:
    if isinstance(value, BaseException):
        return str(value) or type(value).__name__
    raise TypeError(f"msgpack cannot serialise {type(value).__name__}")


def make_unpack(max_bytes: int) -> Callable[[bytes], Packed]:
    """A function that reads jobs. It raises ValueError, or an error of msgpack, for data that arq would not
    write.
    """

    def unpack(data: bytes) -> Packed:
        if len(data) > max_bytes:
            raise ValueError(f"the job is larger than {max_bytes} bytes")
        if data[:1] == pickle.PROTO:
            raise PickledJob(
                "this queue reads no pickles: give `create_pool` job_serializer=msgpack.packb and "
                "job_deserializer=msgpack.unpackb (docs/jobs.md)"
            )
        job = msgpack.unpackb(data)
        if not isinstance(job, dict) or not is_job(job):
            raise ValueError("not a job")
        return job

    return unpack


def is_job(job: Packed) -> bool:
    """Whether arq can run a job by its fields: name, arguments, keyword arguments, number of tries, time of
    queueing.
    """
    name, args, kwargs, tries, queued_ms = (job.get(key) for key in ("f", "a", "k", "t", "et"))
    return (
        isinstance(name, str)
        and isinstance(args, list)
        and (isinstance(kwargs, dict) and all(isinstance(key, str) for key in kwargs))
        and (tries is None or (type(tries) is int and 0 <= tries < 2**31))
        and (type(queued_ms) is int and 0 <= queued_ms < LAST_MS)
    )


# --- process ------------------------------------------------------------------------------------------------


def main() -> None:
    """Run the process; it exits with EX_CONFIG if a setting cannot be served."""
    own = start_process("jobs", "j0")
    with exit_when_unservable():
        settings = Settings.read([])
        configure_process(own, settings)
        arq_log = logging.getLogger("arq.worker")
        arq_log.setLevel(logging.WARNING)  # below that it logs prompts
        arq_log.addFilter(log_in_one_line)
    uvloop.run(serve(settings, own.incarnation))


async def serve(settings: Settings, incarnation: str) -> None:
    """Run jobs until SIGTERM; other workers take those that are not answered by then."""
    client = PoolClient.connect(settings)
    worker = JobWorker(client, settings)
    heartbeat = Heartbeat(client, "jobworker", incarnation, settings.worker_ttl_s)
    log.info("%s takes jobs of the queue %s", incarnation, worker.queue_name)
    try:
        async with heartbeat.sending(settings.heartbeat_s, lambda: {"running": len(worker.job_tasks)}):
            READY.set()
            with contextlib.suppress(asyncio.CancelledError):  # arq's answer to SIGTERM
                await worker.async_run()
    finally:
        with contextlib.suppress(*ERRORS):
            await worker.close()
        await client.redis.aclose()


def log_in_one_line(record: logging.LogRecord) -> bool:
    """Filter of arq's log: a job that was answered with an error is a warning, without the traceback of this
    worker.
    """
    if record.exc_info and isinstance(record.exc_info[1], JobFailed):
        record.exc_info = None
        record.levelno, record.levelname = logging.WARNING, logging.getLevelName(logging.WARNING)
    return True


if __name__ == "__main__":
    main()
