"""Job consumer: reads jobs of other services from the pool's stream `submit`, and answers each.

The gateways of a pool share the stream as one consumer group. An entry stays pending with the gateway that
read it until its job is answered; the entries of a dead gateway are claimed by the others.
"""

import asyncio
import contextlib
import logging
from collections import defaultdict
from dataclasses import replace
from functools import partial
from typing import Any

from redis.exceptions import ResponseError

from api.errors import ApiError, conflict, internal_error, overloaded
from api.event_loop import offload, repeat_forever
from api.http.auth import POLL_S, unauthorized
from api.http.middleware import AccessLog
from api.jobs.job import Job, broker_ms, drop_note, find_model, read_job, validate_job, with_webhook
from api.jobs.records import FAILED, cancel_job, ending_of, note_job
from api.jobs.run import JobRun, Reply
from api.json import to_json
from api.requests import metrics
from api.requests.pool import Pool
from common.api_keys import ApiKey
from common.broker.keys import Keys
from common.broker.lua import Args, call_script, decode_all, in_pairs
from common.ids import is_job_id
from common.process.event_loop import until_beat
from common.process.logs import REQUEST_ID, plural

log = logging.getLogger(__name__)

GROUP = "gateways"
NUM_READ, NUM_CLAIMED, MAX_PENDING = 16, 256, 1_000_000
"""Most entries of one read, of one claim, and of those that are pending with one gateway."""
MAX_TRIES = 2
"""Of a job that cannot be served."""
BLOCK_MS = 1000
"""Longest wait of one read."""
MAX_RELEASED = 100
"""Jobs that one script releases."""
NUM_WAITING = 256
"""Jobs that may run or wait for room at once, beside as many as the pool admits requests."""
Fields = dict[bytes, bytes]


class JobConsumer:
    """Consumes the jobs of the gateway's own pool.

    Attributes:
        name: of the consumer in the group: the gateway's incarnation.
        held: entries that belong to this gateway until their jobs are answered.
        waiting: held entries whose jobs have not started.
        running: jobs that are served, by entry.
        runs: their runs, by the job's id; entries of one job share a run.
        permits: limit the jobs that run or wait for room at once.
        admission_locks: one for each class and API key: its jobs are admitted one after the other, in order,
            and a key at its limit holds up no other's.
        joined: set when the group exists and this gateway's pending entries are held.
    """

    def __init__(self, pool: Pool, access: AccessLog) -> None:
        self.pool = pool
        self.access = access
        self.admission = pool.admission
        self.settings = pool.settings
        self.keys = pool.client.keys
        self.name = pool.gateway
        self.redis: Any = pool.client.redis
        self.held: set[str] = set()
        self.waiting: asyncio.Queue[str] = asyncio.Queue()
        self.running: dict[str, Job] = {}
        self.runs: dict[str, JobRun] = {}
        self.permits = asyncio.Semaphore(self.settings.max_concurrent_requests + NUM_WAITING)
        self.admission_locks: defaultdict[tuple[str, str], asyncio.Lock] = defaultdict(asyncio.Lock)
        self.joined = asyncio.Event()

    async def run(self) -> None:
        """Never returns."""
        async with asyncio.TaskGroup() as self.tasks:
            self.tasks.create_task(repeat_forever(self.read_entries, "reading jobs"))
            self.tasks.create_task(repeat_forever(self.claim_entries, "claiming jobs"))
            self.tasks.create_task(repeat_forever(self.release, "releasing jobs"))
            self.tasks.create_task(self.start_jobs())

    # --- reading entries ------------------------------------------------------------------------------------

    async def read_entries(self) -> None:
        """Hold new entries until the broker fails; first those that are pending with this gateway, because an
        answer of the broker was lost.
        """
        await self.join_group()
        pending = await self.redis.xpending_range(self.keys.submit, GROUP, "-", "+", MAX_PENDING, self.name)
        for entry in pending:
            self.hold(entry["message_id"].decode())
        await submit_lost(self.redis, self.keys, self.running)
        self.joined.set()
        while True:
            new = await self.next_entries()
            num_accepted = len(new) - (await self.count_surplus() if new else 0)
            for entry_id, fields in new[:num_accepted]:
                await self.on_entry(entry_id, fields)
            for entry_id, fields in new[num_accepted:]:
                await self.reject(entry_id, fields)

    async def join_group(self) -> None:
        try:
            await self.redis.xgroup_create(self.keys.submit, GROUP, id="0", mkstream=True)
        except ResponseError as error:
            if not str(error).startswith("BUSYGROUP"):
                raise

    async def next_entries(self) -> list[tuple[str, Fields]]:
        answer = await self.redis.xreadgroup(
            GROUP, self.name, {self.keys.submit: ">"}, count=NUM_READ, block=BLOCK_MS
        )
        return [(entry_id.decode(), fields) for _, items in answer for entry_id, fields in items]

    async def count_surplus(self) -> int:
        """How many of the entries that were just read are beyond SUBMIT_LIMIT."""
        pending = await self.redis.xpending(self.keys.submit, GROUP)
        return max(0, min(NUM_READ, int(pending["pending"]) - self.settings.submit_limit))

    async def claim_entries(self) -> None:
        """Claim the entries of gateways whose heartbeat has expired."""
        await self.joined.wait()
        for consumer in await self.redis.xinfo_consumers(self.keys.submit, GROUP):
            other = consumer["name"].decode(errors="surrogateescape")
            if other != self.name:
                args: Args = {
                    "group": GROUP,
                    "dead": consumer["name"],
                    "claimer": self.name,
                    "max_jobs": NUM_CLAIMED,
                }
                call = call_script("claim_jobs", decode_all, self.keys, other, args=args)
                claimed = await self.pool.client.run(call)
                if claimed:
                    log.warning("claimed of gateway %s: %s", other, plural(len(claimed), "job"))
                for entry_id in claimed:
                    self.hold(entry_id)
        await asyncio.sleep(until_beat(self.settings.heartbeat_s))

    async def on_entry(self, entry_id: str, fields: Fields) -> None:
        if is_cancel(fields):  # cancels do not wait for a permit
            await self.cancel(fields)
            await self.delete_entry(entry_id)
            return
        if self.permits.locked():
            await self.note_waiting(entry_id, fields)
        self.hold(entry_id)

    async def note_waiting(self, entry_id: str, fields: Fields) -> None:
        """Note a job that waits for others to end. Whether its API key counts is asked again in its turn."""
        job = await self.parse(entry_id, fields)
        with contextlib.suppress(ApiError):
            job = job.of_key(self.find_key(job.api_key))
            args: Args = {"job_id": job.id, "entry_id": entry_id, "address": job.address}
            shown = in_pairs(job.describe(self.settings.model_name))
            call = call_script("note_waiting", bool, self.keys, job.id, args=args, more_args=shown)
            await self.pool.client.run(call)

    def hold(self, entry_id: str) -> None:
        if entry_id not in self.held:
            self.held.add(entry_id)
            self.waiting.put_nowait(entry_id)

    async def delete_entry(self, entry_id: str) -> None:
        """Acknowledge and delete an entry whose job is answered."""

        async def command() -> None:
            async with self.redis.pipeline() as pipe:
                pipe.xack(self.keys.submit, GROUP, entry_id)
                pipe.xdel(self.keys.submit, entry_id)
                await pipe.execute()

        await self.admission.retry_forever(command)

    async def cancel(self, fields: Fields) -> None:
        """Cancel a job, at whatever gateway it runs, if it is of the cancel's tenant."""
        job_id = fields[b"cancel"].decode(errors="replace")
        if not is_job_id(job_id):
            log.warning("a cancel is ignored: %.100r is no id of a job", fields[b"cancel"])
            return
        try:
            key = await self.key_of(fields.get(b"api_key", b""))
        except ApiError as error:
            log.warning("a cancel of job %s is ignored: %s", job_id, error)
            return
        tenant = key.tenant if key and not key.admin else ""
        await cancel_job(self.pool, job_id, tenant)

    # --- running jobs ---------------------------------------------------------------------------------------

    async def start_jobs(self) -> None:
        """Start waiting jobs, one for each permit."""
        while True:
            await self.permits.acquire()
            self.tasks.create_task(self.handle_entry(await self.waiting.get()))

    async def handle_entry(self, entry_id: str) -> None:
        """Answer the job of an entry, and delete the entry."""
        try:
            entries = await self.admission.retry_forever(
                lambda: self.redis.xrange(self.keys.submit, entry_id, entry_id)
            )
            for _, fields in entries:
                if is_cancel(fields):
                    await self.cancel(fields)
                else:
                    await self.serve_or_fail(await self.parse(entry_id, fields))
            await self.delete_entry(entry_id)
        except Exception:
            log.exception("entry %s stays in the stream of jobs", entry_id)
        finally:
            self.held.discard(entry_id)
            self.permits.release()

    async def parse(self, entry_id: str, fields: Fields) -> Job:
        """The job of an entry; one that cannot be read, whatever it is, has a fault."""
        size = sum(map(len, fields.values()))
        try:
            return await offload(size, partial(read_job, entry_id, fields, self.pool.max_body_bytes))
        except Exception:
            log.exception("entry %s", entry_id)
            return Job(id=entry_id, entry_id=entry_id, fault=internal_error("this job cannot be read"))

    async def key_of(self, sent: bytes) -> ApiKey | None:
        """The record of the API key that an entry carries; None where there are no keys. Waits until that is
        known, and until a key that was just added is. Raises ApiError (401).
        """
        await self.pool.keys.was_read.wait()
        try:
            return self.find_key(sent)
        except ApiError:
            if not sent:
                raise
            await asyncio.sleep(2 * POLL_S)
            return self.find_key(sent)

    def find_key(self, sent: bytes) -> ApiKey | None:
        """Raises ApiError (401)."""
        if not self.pool.keys.has_keys:
            return None
        if not sent:
            raise unauthorized("Incorrect API key: a job needs one in the field `api_key` of its entry")
        return self.pool.keys.find(sent)

    async def serve_or_fail(self, job: Job) -> None:
        """Serve a job. One that cannot be served, whatever it is, is tried twice, and answered with an
        error.
        """
        for _ in range(MAX_TRIES):
            try:
                await self.serve_if_allowed(job)
                return
            except Exception:
                log.exception("job %s", job.id)
        await self.join_or_run(replace(job, fault=internal_error()), Reply(self.pool, job))

    async def serve_if_allowed(self, job: Job) -> None:
        """Serve a job if its API key is known; else answer it with an error, also where it has the id of a
        job that is known.
        """
        try:
            allowed = job.of_key(await self.key_of(job.api_key))
        except ApiError as error:
            metrics.count_arrival()
            if await self.has_noted(job):  # its key counted then
                await self.join_or_run(replace(job, fault=error), Reply(self.pool, job))
            else:
                metrics.count_error(error.status, error.error_type)
                await self.answer_error(job, error)
            return
        await self.serve(with_webhook(allowed, self.settings))

    async def serve(self, job: Job) -> None:
        """Register a job, and run it unless it waits for its time; returns when it is answered or waits."""
        REQUEST_ID.set(job.id)
        metrics.count_arrival()
        reply = Reply(self.pool, job)
        match await reply.register():
            case "conflict":
                await reply.send_error(conflict("job"), job.entry_id)
            case "live":
                await self.run_in_time(job, reply)

    async def run_in_time(self, job: Job, reply: Reply) -> None:
        """Run a registered job, or leave it among the scheduled ones until its time."""
        match await self.note(job):
            case "full":
                log.warning("job %s is rejected: SUBMIT_LIMIT jobs are scheduled", job.id)
                metrics.count_error(429, "overloaded")
                await self.answer_error(job, overloaded())
            case "live":
                self.running[job.entry_id] = job
                try:
                    await self.join_or_run(job, reply)
                finally:
                    self.running.pop(job.entry_id, None)

    async def note(self, job: Job) -> str:
        """Keep the record of a registered job, and schedule one that may not run yet, unless it is faulty:
        that one is answered at once. Returns `live`, `scheduled` or `full`.
        """
        waits = job.not_before_ms and job.not_before_ms > await broker_ms(self.pool)
        call = note_job(
            self.keys,
            job.id,
            job.entry_id,
            job.describe(self.settings.model_name),
            address=job.address,
            not_before_ms=job.not_before_ms if waits and not await self.is_faulty(job) else 0,
            group=GROUP,
            max_scheduled=self.settings.submit_limit,
        )
        return await self.admission.retry_forever(lambda: self.pool.client.run(call))

    async def is_faulty(self, job: Job) -> bool:
        """Whether a job can never be served as it is."""
        try:
            await validate_job(self.pool, job, await find_model(self.pool, job))
            await drop_note(self.pool, job)
        except ApiError as error:
            return ending_of(error).state == FAILED
        except Exception:
            return True  # its run says so
        return False

    async def has_noted(self, job: Job) -> bool:
        """Whether a gateway has accepted this very entry before, whatever became of its API key."""
        name = self.keys.job_entries(job.id)
        noted = await self.admission.retry_forever(lambda: self.redis.hget(name, job.address))
        return bool(noted == job.entry_id.encode())

    async def release(self) -> None:
        """Submit scheduled jobs whose time has come, then wait for a heartbeat's time."""
        args: Args = {"max_jobs": MAX_RELEASED, "submit_limit": self.settings.submit_limit}
        while (
            await self.pool.client.run(call_script("release_jobs", int, self.keys, args=args)) == MAX_RELEASED
        ):
            pass
        await asyncio.sleep(until_beat(self.settings.heartbeat_s))

    async def join_or_run(self, job: Job, reply: Reply) -> None:
        if (run := self.runs.get(job.id)) is not None:
            run.join(reply)
            await run.ended.wait()
            return
        key_id = job.terms.key.key_id if job.terms.key else ""
        admission_lock = self.admission_locks[job.terms.service_class, key_id]
        run = self.runs[job.id] = JobRun(self.pool, job, admission_lock, self.access)
        run.join(reply)
        try:
            await run.run()
        finally:
            # All replies are finished: an entry that comes now starts a run of its own.
            del self.runs[job.id]
            await run.detach()

    # --- jobs of batches ------------------------------------------------------------------------------------

    async def answer_own(self, job: Job) -> bytes:
        """The answer to a job that has no entry: whoever asks sees to it that the job is asked again if this
        gateway dies. One that was admitted or answered before goes on.
        """
        REQUEST_ID.set(job.id)
        metrics.count_arrival()
        reply = Reply(self.pool, job)
        match await reply.register():
            case "live":
                await self.join_or_run(job, reply)
            case "conflict":
                return to_json(job.family(conflict("request"))[1])
        answer: bytes | None = await self.admission.retry_forever(
            lambda: self.redis.get(self.keys.result(job.id))
        )
        if answer is None:  # the broker has lost it: the job without listeners keeps it as its last frame
            answer = await self.admission.retry_forever(
                lambda: self.redis.hget(self.keys.job(job.id), "last")
            )
        return answer or await self.answer_own(job)  # the broker has lost that, too

    async def reject(self, entry_id: str, fields: Fields) -> None:
        """Answer 429 to an entry beyond SUBMIT_LIMIT, unless its job was accepted before, and has waited."""
        job = await self.parse(entry_id, fields)
        if await self.has_noted(job):
            self.hold(entry_id)
            return
        log.warning(
            "job %s is rejected: SUBMIT_LIMIT (%d) jobs have not ended", entry_id, self.settings.submit_limit
        )
        metrics.count_arrival()
        metrics.count_error(429, "overloaded")
        await self.answer_error(job, overloaded())
        await self.delete_entry(entry_id)

    async def answer_error(self, job: Job, error: ApiError) -> None:
        """Answer an entry with an error. The result of a job that is known by this id stays as it is."""
        known = await self.redis.exists(self.keys.job(job.id))
        await Reply(self.pool, job).send_error(error, job.entry_id if known else job.id)


async def submit_lost(redis: Any, keys: Keys, running: dict[str, Job]) -> None:
    """Submit jobs again whose entries a restored broker does not have, and remove them from `running`:
    without an entry, no other gateway would find a job when this one dies. A faulty job is being answered. A
    job with a result was answered by another gateway, which had claimed its entry.

    Args:
        running: jobs by entry.
    """
    for entry_id, job in [*running.items()]:
        has_entry = await redis.xrange(keys.submit, entry_id, entry_id)
        if job.fault or has_entry or await redis.exists(keys.result(job.id)):
            continue
        if entry_id in running:  # it has not been answered meanwhile
            log.warning("the broker has lost the entry of job %s: it is submitted again", job.id)
            await redis.xadd(keys.submit, job.to_fields())
            running.pop(entry_id, None)


def is_cancel(fields: Fields) -> bool:
    """Whether an entry is a cancel. An entry that is also a job is a faulty job."""
    return b"cancel" in fields and b"job" not in fields
