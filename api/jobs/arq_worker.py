"""arq's queue: each gateway is an arq worker that runs its functions as jobs of the fleet. It serialises them
by msgpack and never reads a pickle, because any program may write to the keys. Only the error of a job that
was pickled is one, so that its client can read it. It submits the jobs to the fleet as any other service
does, and waits for their answers.
"""

import asyncio
import contextlib
import json
import logging
import pickle
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgpack
import orjson
from arq.connections import ArqRedis
from arq.constants import abort_jobs_ss, in_progress_key_prefix, job_key_prefix
from arq.jobs import SerializationError, deserialize_job_raw
from arq.worker import Function, Worker, func
from pydantic import BaseModel, ConfigDict, Field
from redis.exceptions import ResponseError

from api.errors import invalid, tgi
from api.event_loop import attempt, repeat_forever, retry_forever
from api.json import to_json
from api.requests.service_terms import MAX_DEADLINE_MS
from common.broker.client import ERRORS, SerialClient, describe_error
from common.broker.keys import RESULT_TTL_MS
from common.broker.pool_client import PoolClient
from common.process.event_loop import until_beat
from common.settings.settings import Settings

log = logging.getLogger(__name__)

MAX_JOBS = 256
"""arq's jobs that one gateway waits for at once."""

POLL_S = 0.25
CLOSE_TIMEOUT_S = 2.0
"""How long jobs may take to be left to another gateway."""
HEALTH_S = 10
MAX_TRIES = 1000
"""A retry costs nothing, because the fleet keeps the job. Only a job that kills its gateway again and again
is given up.
"""
LAST_MS = 32_503_680_000_000
"""The year 3000: arq makes a date of a time in ms."""
TERMS = ("model", "tenant", "deadline_ms", "traceparent", "webhook", "api_key")
"""Arguments that are fields of the job, not of its chat, or of its texts."""

Packed = dict[str, Any]
ANSWERS_S, MAX_LOOKS = 0.1, 500
"""How soon an answer is looked for, then every twentieth of the time that it takes; most looks a second."""


class JobFailed(Exception):
    """A job that was answered with an error: `str()` is the error object of HTTP, in JSON."""


def invalid_job(why: str) -> JobFailed:
    return JobFailed(to_json(tgi(invalid(why))[1]).decode())


# --- worker ------------------------------------------------------------------------------------------------


class ArqWorker(Worker):
    """An arq worker that survives an absent broker and malformed keys. When its gateway dies, others soon
    take its jobs.
    """

    def __init__(self, client: PoolClient, settings: Settings) -> None:
        unpack = make_unpack(settings.payload_limit)
        super().__init__(
            [job_function(name, names, self.run_in_fleet) for name, names in FUNCTIONS.items()],
            queue_name=client.keys.arq_queue,
            redis_pool=ArqRedis(client.redis.connection_pool, pack, unpack, client.keys.arq_queue),
            max_jobs=MAX_JOBS,
            job_timeout=MAX_DEADLINE_MS / 1000,
            max_tries=MAX_TRIES,
            keep_result=RESULT_TTL_MS / 1000,
            handle_signals=False,
            health_check_interval=HEALTH_S,
            allow_abort_jobs=True,
            log_results=False,
            job_serializer=pack,
            job_deserializer=unpack,
        )
        self.redis: Any = client.redis
        self.keys = client.keys
        self.looks = asyncio.Lock()  # one after the other: one connection serves all jobs
        self.idle_client = SerialClient(client.redis)
        self.in_progress_timeout_s = settings.worker_ttl_s
        arq_log = logging.getLogger("arq.worker")
        arq_log.setLevel(logging.WARNING)  # below that it logs prompts
        arq_log.addFilter(log_in_one_line)

    async def consume(self) -> None:
        """Never returns. At the end its jobs are left to other gateways."""
        try:
            await repeat_forever(self.look, "reading the queue of arq")
        finally:
            for task in self.tasks.values():
                task.cancel()
            if self.tasks:
                await asyncio.wait(self.tasks.values(), timeout=CLOSE_TIMEOUT_S)

    async def look(self) -> None:
        """Start jobs, and end aborted ones, as arq does if there is a job or an abort. Otherwise one command
        does: arq's three are most of what a queue without jobs costs. Nothing that arq raises ends the
        gateway.
        """
        try:
            if self.tasks or await self.idle_client.execute("EXISTS", self.queue_name, abort_jobs_ss):
                await self.drop_aborts()
                await self._poll_iteration()
            else:
                await self.heart_beat()
        except ERRORS:
            raise
        except Exception:
            log.exception("reading the queue of arq")
        await asyncio.sleep(until_beat(POLL_S))

    async def drop_aborts(self) -> None:
        """Drop aborts of jobs that are not there, so that nobody polls for them, and those that were sent
        before their job was queued: they were for another one with its id.
        """
        for name, sent_ms in await self.pool.zrange(abort_jobs_ss, 0, -1, withscores=True):
            with contextlib.suppress(SerializationError, ResponseError):  # of another program's job
                data = await self.pool.get(job_key_prefix + name.decode(errors="replace"))
                queued_ms = (
                    deserialize_job_raw(data, deserializer=self.job_deserializer)[-1] if data else None
                )
                if queued_ms is None or sent_ms <= queued_ms:
                    await self.pool.zrem(abort_jobs_ss, name)

    # --- running a job --------------------------------------------------------------------------------------

    async def run_in_fleet(self, job_id: str, content: dict[str, Any]) -> Any:
        """The fleet's answer; a job that was submitted before is joined. An aborted job is cancelled. The job
        of a gateway that stops goes on, and another one waits for it. Raises JobFailed.
        """
        if "not_before" in content:
            raise invalid_job("`not_before` is no argument: use arq's `_defer_until` or `_defer_by`")
        api_key = content.pop("api_key", None)
        key = {"api_key": api_key} if isinstance(api_key, str) else {}
        try:
            data = json.dumps(content | {"id": job_id}, allow_nan=False)
        except (RecursionError, TypeError, ValueError) as error:
            raise invalid_job(f"the arguments must be JSON: {error}") from error
        try:
            answer = await self.answer_to(job_id, {"job": data, **key})
        except asyncio.CancelledError:
            if job_id in self.aborting_tasks:
                await self.add_entry({"cancel": job_id, **key})
            raise
        result = orjson.loads(answer)
        if "error" in result:
            raise JobFailed(answer.decode())
        return result

    async def answer_to(self, job_id: str, fields: dict[str, Any]) -> bytes:
        """The answer to an entry, or else to its job. If there is none, the broker has lost the job: it is
        submitted again. While the entry is there, an answer may be that of another job with this id.
        """
        answer: bytes | None = None
        while not answer:
            entry_id = await self.add_entry(fields)
            await self.wait_for_end(entry_id)
            find = partial(self.redis.mget, [self.keys.result(name) for name in (entry_id, job_id)])
            own, shared = await attempt(find, retry_forever)
            if not (answer := own or shared):
                log.warning("the broker has lost job %s: it is submitted again", job_id)
        return answer

    async def add_entry(self, fields: dict[str, Any]) -> str:
        """Add an entry to `submit`, once the broker answers. Returns its id."""
        entry_id: bytes = await attempt(lambda: self.redis.xadd(self.keys.submit, fields), retry_forever)
        return entry_id.decode()

    async def wait_for_end(self, entry_id: str) -> None:
        """Wait until an entry has left `submit`."""
        look, began_s = partial(self.redis.xrange, self.keys.submit, entry_id, entry_id), time.monotonic()
        while True:
            async with self.looks:
                if not await attempt(look, retry_forever):
                    return
            taken_s = time.monotonic() - began_s
            await asyncio.sleep(max(ANSWERS_S, taken_s / 20, len(self.tasks) / MAX_LOOKS))

    # --- overrides of arq's methods -------------------------------------------------------------------------

    async def heart_beat(self) -> None:
        """Renew the claim on this gateway's jobs. When it dies the claim expires, and others take them."""
        await super().heart_beat()
        async with self.pool.pipeline(transaction=False) as pipe:
            for job_id in self.job_tasks:
                pipe.psetex(in_progress_key_prefix + job_id, round(self.in_progress_timeout_s * 1000), b"1")
            await pipe.execute()

    async def start_jobs(self, job_ids: list[bytes]) -> None:
        """Start the jobs that nobody runs, one by one, because arq does not release the slot of a job whose
        start fails. A job that runs here is not started again if its claim has expired while this process
        was stopped. arq would ask for the claim of each job of other gateways by itself, and reads the first
        jobs alone: where others run all of these, the next poll reads those after them. Names that are not
        UTF-8 are dropped: arq did not queue them.
        """
        names = [name.decode(errors="replace") for name in job_ids]
        if malformed := [one for name, one in zip(names, job_ids, strict=True) if name.encode() != one]:
            log.error("%r are dropped: they are not names of jobs", malformed)
            await self.pool.zrem(self.queue_name, *malformed)
        names = [name for name in names if name not in self.tasks]
        claims = await self.pool.mget([in_progress_key_prefix + name for name in names]) if names else []
        free = [name for name, claim in zip(names, claims, strict=True) if not claim]
        goes_on = not free and len(job_ids) == self.queue_read_limit
        self._queue_read_offset = self._queue_read_offset + len(job_ids) if goes_on else 0
        for name in free:
            try:
                await super().start_jobs([name.encode()])
            except Exception:
                self.job_counter -= 1
                self.sem.release()
                raise

    async def run_job(self, job_id: str, score: int) -> None:
        """Run a job. A job whose key has another type than arq's is dropped, and harms no other. A gateway
        that is told to end, ends in order, even while a job's keys are read or written.
        """
        try:
            if await self.pool.type(job_key_prefix + job_id) in (b"string", b"none"):
                await super().run_job(job_id, score)
            else:
                log.error("job %s is dropped: arq did not write its key", job_id)
                await self.pool.zrem(self.queue_name, job_id)
        except asyncio.CancelledError:
            log.info("job %s is left to another gateway", job_id)
        except ERRORS as error:
            log.warning("job %s is tried again: %s", job_id, describe_error(error))
        except Exception:
            log.exception("job %s is tried again", job_id)


FUNCTIONS = {
    "generate": ("inputs", "parameters"),
    "chat": ("messages",),
    "embed": ("input",),
    "rerank": ("query", "documents"),
}
"""Functions that arq clients can enqueue → the fields of a job that their arguments are, in order."""


def job_function(name: str, names: Sequence[str], run_in_fleet: Any) -> Function:
    """A function whose other arguments have names: they are fields of the job, or its parameters if it has no
    argument for these. `run_in_fleet(job_id, content)` gives the answer.
    """

    async def run(ctx: dict[str, Any], *given: Any, **fields: Any) -> Any:
        if len(given) > len(names):
            raise invalid_job(f"`{name}` takes {' and '.join(names)}, and other arguments by their names")
        content = dict.fromkeys(names) | dict(zip(names, given, strict=False))
        own = [one for one in fields if one in (*names, *TERMS) or "parameters" in names]
        content |= {one: fields.pop(one) for one in own}
        return await run_in_fleet(ctx["job_id"], {"parameters": fields} | content)

    return func(run, name=name)


# --- serializer ---------------------------------------------------------------------------------------------


class PickledJob(ValueError):
    """A job of a client with arq's default serializer."""


class ArqJob(BaseModel):
    """What arq can run: name, arguments, keyword arguments, number of tries, time of queueing."""

    model_config = ConfigDict(strict=True)

    f: str
    a: list[Any]
    k: dict[str, Any]
    t: int | None = Field(None, ge=0, lt=2**31)
    et: int = Field(ge=0, lt=LAST_MS)


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
        job: Packed = msgpack.unpackb(data)
        ArqJob.model_validate(job)
        return job

    return unpack


# --- log ----------------------------------------------------------------------------------------------------


def log_in_one_line(record: logging.LogRecord) -> bool:
    """Filter of arq's log: a job that was answered with an error is a warning, without the traceback of this
    gateway.
    """
    if record.exc_info and isinstance(record.exc_info[1], JobFailed):
        record.exc_info = None
        record.levelno, record.levelname = logging.WARNING, logging.getLevelName(logging.WARNING)
    return True
