"""Job consumer: reads jobs of other services from the pool's stream `submit`, and answers each.

The gateways of a pool share the stream as one consumer group. An entry stays pending with the gateway that
read it until its job is answered; the entries of a dead gateway are claimed by the others. The gateway acts
as the job's client, from its admission to its answer: a reply sends frames of the job to a channel and to a
stream, and its whole answer to `result:{id}`. Frames are numbered, so that each is sent once even if two
gateways serve the job.
"""

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from redis.exceptions import ResponseError

from api.answers.answer import HttpAnswer
from api.errors import ApiError, conflict, failed, internal_error, overloaded
from api.event_loop import RETRY_PAUSE_S, attempt, offload, repeat_forever, retry_forever
from api.http.auth import POLL_S, unauthorized
from api.http.middleware import (
    AccessLog,
    RequestRecord,
    RequestTrace,
    count_longest,
    traced,
)
from api.jobs.job import (
    Job,
    drop_note,
    left_ms,
    read_job,
    validate_job,
    waiting_turn,
    with_webhook,
)
from api.jobs.records import (
    DONE,
    FAILED,
    FRAMES_LOST,
    GOES_ON,
    MAX_ADDRESSES,
    JobEnding,
    Listener,
    cancel_job,
    ending_of,
    write_reply,
)
from api.json import to_json
from api.requests import metrics
from api.requests.pool import Pool
from api.requests.registry import PoolRegistry
from api.requests.request_scripts import address
from api.streams.stream import Stream, new_stream
from api.webhooks import check_room
from common.api_keys import ApiKey
from common.broker.keys import RESULT_TTL_MS, Keys
from common.broker.lua import Args, call_script, decode_all, in_pairs
from common.ids import is_job_id
from common.messages.codec import encode
from common.messages.events import Terminal
from common.process.event_loop import run_until_one_ends, until_beat
from common.process.logs import REQUEST_ID, plural
from common.tracing import NS_PER_MS

log = logging.getLogger(__name__)

MENDED = ("unavailable", "overloaded", "rate_limit")
"""Types of errors that a wait mends."""

# --- one job -----------------------------------------------------------------------------------------------


class JobRun:
    """One job while this gateway serves it.

    Attributes:
        admission_lock: shared by the runs that are admitted one after the other.
        listeners: one for each entry with this job.
        has_listener: set when one of the entries names a channel or a stream.
        ended: set when the job is answered, or this gateway gives it up.
        frames: all frames so far, in the order that every gateway gives them; none are made before somebody
            listens.
        trace: None where it is not sampled.
        answer: what it asks for; None until it has been validated.
        ending: what its record says of its end.
    """

    def __init__(
        self, pools: PoolRegistry, job: Job, admission_lock: asyncio.Lock, access: AccessLog
    ) -> None:
        self.pools = pools
        self.pool = pool = pools.own
        self.job = job
        self.admission_lock = admission_lock
        self.relay = pool.relay
        self.redis: Any = pool.client.redis
        self.listeners: list[Listener] = []
        self.has_listener = asyncio.Event()
        self.ended = asyncio.Event()
        self.frames: list[bytes] = []
        self.streams: list[Stream] = []
        self.access = access
        self.record = RequestRecord("job", "submit")
        self.record.note({"request_id": job.id})
        self.answer: HttpAnswer | None = None
        self.ending = JobEnding(DONE, 200)

    def join(self, job: Job) -> None:
        """Send all frames where another entry with the same job wants them, too."""
        self.listeners.append(Listener(job.channel(self.pool.client.keys), job.in_stream))
        if job.has_listeners:
            self.has_listener.set()

    async def run(self) -> None:
        """Serve the job; returns when it is answered, with a result or an error."""
        self.record.trace = begin_job_trace(self.pool, self.job)
        await self.send(await self.render_result())
        if self.answer is not None and self.streams:
            self.record.note_streams(self.answer, self.streams, "cancelled")
            count_longest(self.streams)
        self.access.write(self.record)

    async def render_result(self) -> bytes:
        """The result or the error, with which the requests that go on are cancelled: nobody would get what
        they make. An error becomes the last frame, too, unless a frame has it already.
        """
        try:
            result = await self.serve()
            self.record.status = 200
            return result
        except ApiError as error:
            failure, why = error, str(error)
        except Exception as error:
            log.exception("job %s", self.job.id)
            failure, why = internal_error(), type(error).__name__
        for stream in self.streams:
            if stream.admitted and (stream.ended_here or not stream.terminal):
                await self.pool.cancel(stream.request.request_id)
        self.record.note({"reason": failure.error_type})
        metrics.count_error(failure.status, failure.error_type)
        if (trace := self.record.trace) is not None:
            trace.attributes["error.type"] = failure.error_type
            trace.error = trace.generation_error = why
        self.record.status, answered = self.job.family(failure)
        self.ending = ending_of(failure, self.record.status)
        body = to_json(answered)
        if body not in self.frames:
            self.frames.append(body)
        return body

    async def serve(self) -> bytes:
        """The result. Raises ApiError."""
        if self.job.fault:
            raise self.job.fault
        assert self.job.protocol is not None
        self.protocol = self.job.protocol
        async with waiting_turn(self.pool, self.job, self.admission_lock):
            await attempt(self.pool.check_admission, self.wait)
            if self.job.webhook:
                await attempt(lambda: check_room(self.pool.client), self.wait)
            answer = self.answer = await attempt(lambda: validate_job(self.pools, self.job), self.wait)
            await self.admit_all(traced(answer, self.record.trace, self.protocol.operation))
        await self.send_frames(answer)
        for stream in self.streams:
            await self.pool.let_go(stream.request)
        for stream in self.streams:
            assert stream.terminal is not None
            if not stream.finished:
                raise failed(stream.terminal)
        num_records = sum(stream.num_records for stream in self.streams)
        result, _ = await offload(num_records, self.protocol.renderer(answer, self.streams).whole)
        if self.has_listener.is_set() and not self.frames:  # the whole is the only frame
            self.frames.append(result)
        return result

    # --- admission ------------------------------------------------------------------------------------------

    async def wait(self, error: Exception) -> None:
        """Retry policy of a job: wait for a worker, for room in the queue and for pictures, up to its
        deadline. Raises ApiError when it is cancelled or at fault, or its API key counts no more.
        """
        if isinstance(error, ApiError) and error.error_type not in MENDED:
            raise error
        await self.check_cancelled()
        if self.job.terms.key:
            self.pool.keys.named(self.job.terms.key.key_id)
        left_ms(self.pool, self.job)
        await asyncio.sleep(RETRY_PAUSE_S)

    async def admit_all(self, answer: HttpAnswer) -> None:
        """Admit the request of each choice once there is room for it. Raises ApiError."""
        await self.check_cancelled()
        job_key = self.pool.client.keys.job(self.job.id)
        await self.pool.retry_forever(lambda: self.redis.hset(job_key, "choices", len(answer.requests)))
        for i, choice in enumerate(answer.choices()):
            own = replace(
                choice,
                request_id=f"{self.job.id}#{i}",
                ttl_ms=left_ms(self.pool, self.job),
            )
            addressed = address(self.pool.settings, self.pool.gateway, own, answer)
            stream = new_stream(replace(addressed, digest=self.job.digest), self.pool.tokenizer)
            self.streams.append(stream)
            if len(encode(stream.request)) > self.pool.settings.max_queued_bytes:
                raise overloaded()
            charge = self.pool.charge(stream.request, i, answer)
            if await attempt(partial(self.pool.admit, stream, charge), self.wait):
                await self.subscribe_first_channel(stream)
            self.relay.filler.request_fill([stream])
        await self.check_cancelled()

    async def subscribe_first_channel(self, stream: Stream) -> None:
        """Subscribe to the channel of the gateway that admitted the request first: its events go there."""
        request_key = self.pool.client.keys.request(stream.request.request_id)
        channel: bytes | None = await self.pool.retry_forever(lambda: self.redis.hget(request_key, "channel"))
        if channel and channel.decode() != self.relay.channel:
            stream.request = replace(stream.request, channel=channel.decode())
            self.relay.follow_channel(stream.request.channel)

    async def check_cancelled(self) -> None:
        """If the job was cancelled, cancel its requests. Raises ApiError unless all of them are admitted."""
        job_key = self.pool.client.keys.job(self.job.id)
        if await self.pool.retry_forever(lambda: self.redis.hexists(job_key, "cancel")):
            for stream in self.streams:
                await self.pool.cancel(stream.request.request_id)
            if not self.streams or not self.streams[-1].admitted:
                raise failed(Terminal(self.job.id, "cancelled", 0, "cancelled: client", "cancelled"))

    # --- answer ---------------------------------------------------------------------------------------------

    async def send_frames(self, answer: HttpAnswer) -> None:
        """Send frames, from the first listener on, until the end; without a listener, wait for the end."""
        await run_until_one_ends(self.has_listener.wait(), all_ended(self.streams))
        if self.has_listener.is_set() and (feed := self.protocol.renderer(answer, self.streams).chunks()):
            async for new in feed:
                self.frames += new
                if not all(one.terminal for one in self.streams):  # the last frames are sent with the answer
                    await self.send()
        await all_ended(self.streams)

    async def send(self, answer: bytes = b"") -> None:
        """Send each listener the frames that it does not have, or all of them if the broker has lost some.
        With the last frames comes the answer: after the last frame a client finds it.
        """
        for listener in self.listeners:  # those that join meanwhile, too
            is_new = listener.is_there and len(self.frames) > listener.num_sent
            for first in (listener.num_sent, 0) if answer or is_new else ():
                if await self.send_from(first, listener, answer) != FRAMES_LOST:
                    break
                log.warning("job %s: the broker has lost frames: all are sent again", self.job.id)
            listener.num_sent = len(self.frames)

    async def send_from(self, first: int, listener: Listener, answer: bytes) -> int:
        ids = [stream.request.request_id for stream in self.streams]
        ending = self.ending if answer else GOES_ON
        keys, frames = self.pool.client.keys, self.frames[first:]
        call = write_reply(keys, self.job.id, listener, frames, first, answer, ids, ending)
        return await self.pool.retry_forever(lambda: self.pool.client.run(call))

    async def detach(self) -> None:
        """Remove the streams from this gateway alone: another gateway goes on with a job that is not
        answered.
        """
        for stream in self.streams:  # without an `await`: the job's next run may use their ids
            self.relay.release(stream)
            if stream.terminal:
                metrics.count_stream(stream, self.pool.workers.limits)
        self.ended.set()


async def all_ended(streams: Sequence[Stream]) -> None:
    for stream in streams:
        await stream.ended.wait()


def begin_job_trace(pool: Pool, job: Job) -> RequestTrace | None:
    """The trace that a job names, or its own; None if it is not sampled. This task is in it from now on."""
    given = job.body.traceparent if job.body is not None else None
    return RequestTrace.begin(
        f"{pool.settings.pool}/{job.id}/{job.entry_ms}",
        {"traceparent": given} if given else {},
        name="process submit",
        kind="CONSUMER",
        inner_name=job.protocol.span if job.protocol else "generate",
        attributes={
            "messaging.system": "redis",
            "messaging.operation.name": "process",
            "messaging.operation.type": "process",
            "messaging.destination.name": pool.client.keys.submit,
            "messaging.message.id": job.entry_id,
            "tokenfleet.request.id": job.id,
        },
        started_ns=NS_PER_MS * job.due_ms,
    )


# --- all jobs -----------------------------------------------------------------------------------------------

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
        held: entries that belong to this gateway until their jobs are answered, with the jobs that run.
        waiting: held entries whose jobs have not started.
        runs: their runs, by the job's id; entries of one job share a run.
        permits: limit the jobs that run or wait for room at once.
        admission_locks: one for each class, API key and tenant with a run: its jobs are admitted one after
            the other, in order, and one at its limit holds up no other's.
        joined: set when the group exists and this gateway's pending entries are held.
    """

    def __init__(self, pools: PoolRegistry, access: AccessLog) -> None:
        self.pools = pools
        self.pool = pool = pools.own
        self.access = access
        self.settings = pool.settings
        self.keys = pool.client.keys
        self.name = pool.gateway
        self.redis: Any = pool.client.redis
        self.held: dict[str, Job | None] = {}
        self.waiting: asyncio.Queue[str] = asyncio.Queue()
        self.runs: dict[str, JobRun] = {}
        self.permits = asyncio.Semaphore(self.settings.max_concurrent_requests + NUM_WAITING)
        self.admission_locks: WeakValueDictionary[tuple[str, ...], asyncio.Lock] = WeakValueDictionary()
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
        await submit_lost(self.redis, self.keys, self.held)
        self.joined.set()
        while True:
            read = await self.redis.xreadgroup(
                GROUP, self.name, {self.keys.submit: ">"}, count=NUM_READ, block=BLOCK_MS
            )
            new = [(entry_id.decode(), fields) for _, items in read for entry_id, fields in items]
            num_pending = int((await self.redis.xpending(self.keys.submit, GROUP))["pending"]) if new else 0
            num_accepted = len(new) - max(0, num_pending - self.settings.submit_limit)
            for place, (entry_id, fields) in enumerate(new):
                is_taken = place < num_accepted or is_cancel(fields)
                await (self.on_entry if is_taken else self.reject)(entry_id, fields)

    async def join_group(self) -> None:
        try:
            await self.redis.xgroup_create(self.keys.submit, GROUP, id="0", mkstream=True)
        except ResponseError as error:
            if not str(error).startswith("BUSYGROUP"):
                raise

    async def claim_entries(self) -> None:
        """Claim the entries of gateways whose heartbeat has expired."""
        await self.joined.wait()
        for consumer in await self.redis.xinfo_consumers(self.keys.submit, GROUP):
            other = consumer["name"].decode(errors="replace")  # no gateway's, where it is not UTF-8
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
        if is_cancel(fields):  # it does not wait for a permit, and nothing waits for it
            self.tasks.create_task(self.handle_entry(entry_id))
            return
        if self.permits.locked() and self.pool.keys.was_read.is_set():  # it waits for others, and is seen
            job = await self.parse(entry_id, fields)
            with contextlib.suppress(ApiError):  # its API key is asked again when it starts
                if await self.register(job.of_key(self.find_key(job.api_key))) == "ended":
                    await self.delete_entry(entry_id)
                    return
        self.hold(entry_id)

    def hold(self, entry_id: str) -> None:
        if entry_id not in self.held:
            self.held[entry_id] = None
            self.waiting.put_nowait(entry_id)

    async def delete_entry(self, entry_id: str) -> None:
        """Acknowledge and delete an entry whose job is answered."""
        submit = self.keys.submit
        await self.pool.retry_forever(
            lambda: self.redis.pipeline().xack(submit, GROUP, entry_id).xdel(submit, entry_id).execute()
        )

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
        await attempt(partial(cancel_job, self.pool, job_id, tenant), retry_forever)

    # --- running jobs ---------------------------------------------------------------------------------------

    async def start_jobs(self) -> None:
        """Start waiting jobs, one for each permit."""
        while True:
            await self.permits.acquire()
            task = self.tasks.create_task(self.handle_entry(await self.waiting.get()))
            task.add_done_callback(lambda _: self.permits.release())

    async def handle_entry(self, entry_id: str) -> None:
        """Answer the job of an entry, and delete the entry."""
        try:
            entries = await self.pool.retry_forever(
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
            self.held.pop(entry_id, None)

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

    async def key_of_job(self, job: Job) -> ApiKey | None:
        """The record of a job's API key: of one that was accepted also if its key has another text by now.
        Raises ApiError (401).
        """
        try:
            return await self.key_of(job.api_key)
        except ApiError:
            find = partial(self.redis.hget, self.keys.job_record(job.id), "key_id")
            if not await self.has_noted(job) or not (key_id := await self.pool.retry_forever(find)):
                raise
            return self.pool.keys.named(key_id.decode())

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
        await self.join_or_run(replace(job, fault=internal_error()))

    async def serve_if_allowed(self, job: Job) -> None:
        """Serve a job if its API key is known; else answer it with an error, also where it has the id of a
        job that is known.
        """
        try:
            allowed = job.of_key(await self.key_of_job(job))
        except ApiError as error:
            metrics.count_arrival()
            if await self.has_noted(job):  # its key counted then
                await self.join_or_run(replace(job, fault=error))
            else:
                await self.answer_error(job, error)
            return
        await self.serve(with_webhook(allowed, self.settings))

    async def serve(self, job: Job) -> None:
        """Register a job, and run it unless it waits for its time: then it leaves `submit`, but a faulty one
        is answered at once.
        """
        REQUEST_ID.set(job.id)
        waits = job.not_before_ms > 1000 * self.pool.client.clock.now_s()
        outcome = await self.register(job, is_noted=not waits)
        if outcome == "live" and waits:
            due_ms = 0 if await self.is_faulty(job) else job.not_before_ms
            outcome = await self.register(job, not_before_ms=due_ms)
        if outcome != "scheduled":
            metrics.count_arrival()
        match outcome:
            case "conflict":
                await self.answer_error(job, conflict("job"))
            case "full":
                log.warning("job %s is rejected: SUBMIT_LIMIT jobs are scheduled", job.id)
                await self.answer_error(job, overloaded())
            case "live":
                self.held[job.entry_id] = job
                await self.join_or_run(job)

    async def register(self, job: Job, *, is_noted: bool = True, not_before_ms: int = 0) -> str:
        """Register the job of an entry, and keep its record if it `is_noted`. One that may not run yet leaves
        `submit` until its time. Returns `live`, `scheduled`, `full` when too many jobs are scheduled, `ended`
        (answered again) or `conflict`.

        Args:
            not_before_ms: 0 for a job that is not to wait.
        """
        args: Args = {
            "digest": job.digest,
            "tenant": job.terms.tenant if job.terms.key else "",
            "webhook": job.webhook,
            "channel": job.channel(self.keys),
            "in_stream": int(job.in_stream),
            "reply_ttl_ms": RESULT_TTL_MS,
            "job_id": job.id,
            "entry_id": job.entry_id if is_noted else "",
            "address": job.address,
            "not_before_ms": not_before_ms,
            "group": GROUP,
            "max_scheduled": self.settings.submit_limit,
            "max_addresses": MAX_ADDRESSES,
        }
        shown = in_pairs(job.describe(self.settings.model_name))
        call = call_script("register_job", bytes.decode, self.keys, job.id, args=args, more_args=shown)
        return await self.pool.retry_forever(lambda: self.pool.client.run(call))

    async def is_faulty(self, job: Job) -> bool:
        """Whether a job can never be served as it is; that is not known before a worker was ready."""
        try:
            await self.pool.check_admission()
            await validate_job(self.pools, job)
            await drop_note(self.pool, job)
        except ApiError as error:
            return ending_of(error, error.status).state == FAILED
        except Exception:
            return True  # its run says so
        return False

    async def has_noted(self, job: Job) -> bool:
        """Whether a gateway has accepted this very entry before, whatever became of its API key."""
        look = partial(self.redis.hget, self.keys.job_entries(job.id), job.address)
        return bool(await self.pool.retry_forever(look) == job.entry_id.encode())

    async def release(self) -> None:
        """Submit scheduled jobs whose time has come, then wait for a heartbeat's time."""
        args: Args = {"max_jobs": MAX_RELEASED, "submit_limit": self.settings.submit_limit}
        while (
            await self.pool.client.run(call_script("release_jobs", int, self.keys, args=args)) == MAX_RELEASED
        ):
            pass
        await asyncio.sleep(until_beat(self.settings.heartbeat_s))

    async def join_or_run(self, job: Job) -> None:
        if (run := self.runs.get(job.id)) is not None:
            run.join(job)
            await run.ended.wait()
            return
        key_id = job.terms.key.key_id if job.terms.key else ""
        place = job.terms.service_class, key_id, job.terms.tenant
        admission_lock = self.admission_locks.setdefault(place, asyncio.Lock())
        run = self.runs[job.id] = JobRun(self.pools, job, admission_lock, self.access)
        run.join(job)
        try:
            await run.run()
        finally:
            # All listeners have all: an entry that comes now starts a run of its own.
            del self.runs[job.id]
            await run.detach()

    # --- jobs of batches ------------------------------------------------------------------------------------

    async def answer_own(self, job: Job) -> tuple[int, bytes]:
        """The answer, as HTTP would give it, to a job that has no entry: whoever asks sees to it that the job
        is asked again if this gateway dies. One that was admitted or answered before goes on.
        """
        REQUEST_ID.set(job.id)
        metrics.count_arrival()
        match await self.register(job, is_noted=False):
            case "live":
                await self.join_or_run(job)
            case "conflict":
                status, body = job.family(conflict("request"))
                return status, to_json(body)
        # without listeners the answer is the last frame; a gateway of an earlier version gave no status
        find = partial(self.redis.hmget, self.keys.job(job.id), "status", "last")
        given, answer = await self.pool.retry_forever(find)
        if answer is None:
            return await self.answer_own(job)  # the broker has lost it
        return int(given or (500 if answer.startswith(b'{"error"') else 200)), answer

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
        await self.answer_error(job, overloaded())
        await self.delete_entry(entry_id)

    async def answer_error(self, job: Job, error: ApiError) -> None:
        """Answer an entry alone with an error. What a job that is known by its id has sent stays as it is."""
        metrics.count_error(error.status, error.error_type)
        body, channel = to_json(job.family(error)[1]), job.channel(self.keys)
        known = await self.pool.retry_forever(lambda: self.redis.exists(self.keys.job(job.id)))
        result, reply = self.keys.result(job.entry_id if known else job.id), self.keys.reply(job.id)

        async def send() -> None:
            pipe = self.redis.pipeline().set(result, body, px=RESULT_TTL_MS)
            if job.in_stream and not known:
                pipe.delete(reply).xadd(reply, {"frame": body}, "1-0").pexpire(reply, RESULT_TTL_MS)
            await (pipe.publish(channel, body) if channel else pipe).execute()

        await self.pool.retry_forever(send)


async def submit_lost(redis: Any, keys: Keys, held: dict[str, Job | None]) -> None:
    """Submit running jobs again whose entries a restored broker does not have: without an entry, no other
    gateway would find a job when this one dies. A faulty job is being answered. A job with a result was
    answered by another gateway, which had claimed its entry.

    Args:
        held: jobs by entry, those that are submitted again no more.
    """
    for entry_id, job in [*held.items()]:
        if job is None:
            continue
        has_entry = await redis.xrange(keys.submit, entry_id, entry_id)
        if job.fault or has_entry or await redis.exists(keys.result(job.id)):
            continue
        if held.get(entry_id):  # it has not been answered meanwhile
            log.warning("the broker has lost the entry of job %s: it is submitted again", job.id)
            await redis.xadd(keys.submit, job.to_fields())
            held[entry_id] = None


def is_cancel(fields: Fields) -> bool:
    """Whether an entry is a cancel. An entry that is also a job is a faulty job."""
    return b"cancel" in fields and b"job" not in fields
