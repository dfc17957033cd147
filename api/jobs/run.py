"""Job run: one job from its admission to its answer; the gateway acts as its client.

A reply sends frames of the job to a channel and to a stream, and its whole answer to `result:{id}`. Frames
are numbered, so that each is sent once even if two gateways serve the job.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import replace
from typing import Any

from api.answers.answer import HttpAnswer
from api.errors import (
    INSUFFICIENT_QUOTA,
    ApiError,
    failed,
    internal_error,
    overloaded,
)
from api.event_loop import RETRY_PAUSE_S, attempt, offload
from api.http.middleware import (
    AccessLog,
    AccessRecord,
    RequestTrace,
    count_longest,
    generation_attributes,
    note_answer,
    note_streams,
)
from api.jobs.job import Job, find_model, left_ms, validate_job, waiting_turn
from api.jobs.records import DONE, FRAMES_LOST, GOES_ON, JobEnding, ending_of, write_reply
from api.json import to_json
from api.prompts.pictures import PICTURE_GONE
from api.requests import metrics
from api.requests.pool import Pool
from api.requests.request_scripts import KeyCharge, address
from api.streams.stream import Stream, new_stream
from api.webhooks import check_room
from common.broker.keys import JOB_TTL_MS, RESULT_TTL_MS
from common.broker.lua import Args, call_script
from common.messages.codec import encode
from common.messages.events import Terminal
from common.process.event_loop import run_until_one_ends
from common.process.logs import TRACEPARENT
from common.tracing import NS_PER_MS

log = logging.getLogger(__name__)

NO_RETRY = ("conflict", "unauthorized", INSUFFICIENT_QUOTA, PICTURE_GONE)
"""Types of errors that no wait mends."""
MAX_FRAMES = 2**20
"""In the stream of a job: more than any has."""


Frame = tuple[int, int, bytes]
"""Lane, index in its lane, text. Every gateway makes the same frames of a lane; the order of lanes may
differ.
"""


class Reply:
    """Answers one entry of `submit`.

    Attributes:
        num_sent: frames of the job that this reply has sent.
    """

    def __init__(self, pool: Pool, job: Job) -> None:
        self.client = pool.client
        self.keys = pool.client.keys
        self.retry_forever = pool.admission.retry_forever
        self.job = job
        self.channel = self.keys.channel(job.reply_to) if job.reply_to else ""
        self.num_sent = 0

    async def register(self) -> str:
        """Register the entry's job. Returns `live`, `ended` (answered again) or `conflict`."""
        job = self.job
        args: Args = {
            "digest": job.digest,
            "tenant": job.terms.tenant if job.terms.key else "",
            "webhook": job.webhook,
            "ttl_ms": JOB_TTL_MS,
            "channel": self.channel,
            "in_stream": int(job.in_stream),
            "reply_ttl_ms": RESULT_TTL_MS,
        }
        call = call_script("register_job", bytes.decode, self.keys, job.id, args=args)
        return await self.retry_forever(lambda: self.client.run(call))

    async def send_new(self, frames: list[Frame]) -> None:
        """Send the frames that are not sent yet."""
        if self.job.has_listeners and len(frames) > self.num_sent:
            await self.send(frames)
        self.num_sent = len(frames)

    async def send_error(self, error: ApiError, result_id: str) -> None:
        """Answer this entry alone; the job with its id stays as it is."""
        body = to_json(self.job.family(error)[1])

        async def command() -> None:
            async with self.client.redis.pipeline() as pipe:
                pipe.set(self.keys.result(result_id), body, px=RESULT_TTL_MS)
                if self.channel:
                    pipe.publish(self.channel, body)
                await pipe.execute()

        await self.retry_forever(command)

    async def send(
        self,
        frames: list[Frame],
        answer: bytes = b"",
        request_ids: Sequence[str] = (),
        ending: JobEnding = GOES_ON,
    ) -> None:
        """Send the new frames, or all of them if the broker has lost some. The answer is sent together with
        the last frames: after the last frame a client finds it.
        """

        async def send_from(first: int) -> int:
            call = write_reply(
                self.keys,
                self.job.id,
                channel=self.channel,
                max_entries=MAX_FRAMES * self.job.in_stream,
                answer=answer,
                request_ids=request_ids,
                frames=frames[first:],
                num_heard=self.num_sent - first,
                ending=ending,
            )
            return await self.retry_forever(lambda: self.client.run(call))

        if await send_from(self.num_sent) == FRAMES_LOST:
            log.warning("job %s: the broker has lost frames: all are sent again", self.job.id)
            await send_from(0)


# --- one job -----------------------------------------------------------------------------------------------


class JobRun:
    """One job while this gateway serves it.

    Attributes:
        admission_lock: shared by all runs of a class, which are admitted one after the other.
        replies: one for each entry with this job.
        has_listener: set when one of the replies has a channel or a stream.
        ended: set when the job is answered, or this gateway gives it up.
        frames: all frames so far; none are made before a reply has listeners.
        num_frames: their number in each lane.
        trace: None where it is not sampled.
        model_name: of the pool's model, or of the adapter that the job names.
        ending: what its record says of its end.
    """

    def __init__(self, pool: Pool, job: Job, admission_lock: asyncio.Lock, access: AccessLog) -> None:
        self.pool = pool
        self.job = job
        self.admission_lock = admission_lock
        self.admission = pool.admission
        self.relay = pool.relay
        self.redis: Any = pool.client.redis
        self.replies: list[Reply] = []
        self.has_listener = asyncio.Event()
        self.ended = asyncio.Event()
        self.frames: list[Frame] = []
        self.num_frames: Counter[int] = Counter()
        self.streams: list[Stream] = []
        self.trace: RequestTrace | None = None
        self.access = access
        self.record = AccessRecord("job", "submit")
        self.record.note({"request_id": job.id})
        self.model_name = pool.settings.model_name
        self.ending = JobEnding(DONE, 200)

    def join(self, reply: Reply) -> None:
        """Add the reply of another entry with the same job: it gets all frames."""
        self.replies.append(reply)
        if reply.job.has_listeners:
            self.has_listener.set()

    async def run(self) -> None:
        """Serve the job; returns when it is answered, with a result or an error."""
        self.trace = begin_job_trace(self.pool, self.job)
        answer = await self.render_result()
        request_ids = [stream.request.request_id for stream in self.streams]
        for reply in self.replies:
            await reply.send(self.frames, answer, request_ids, self.ending)
        if self.streams:
            note_streams(self.record, self.model_name, self.streams, "cancelled")
            count_longest(self.streams)
        self.access.write(self.record)
        if self.trace is not None:
            self.trace.finish()

    async def render_result(self) -> bytes:
        """The result or the error. An error becomes the last frame, too, unless a frame has it already."""
        try:
            result = await self.serve()
            self.record.status = 200
            return result
        except ApiError as error:
            failure, why = error, str(error)
        except Exception as error:
            log.exception("job %s", self.job.id)
            failure, why = internal_error(), type(error).__name__
        self.record.note({"reason": failure.error_type})
        metrics.count_error(failure.status, failure.error_type)
        if self.trace is not None:
            self.trace.attributes["error.type"] = failure.error_type
            self.trace.error = self.trace.generation_error = why
        self.ending = ending_of(failure)
        self.record.status, answered = self.job.family(failure)
        body = to_json(answered)
        if all(text != body for _, _, text in self.frames):
            self.add_frames([(0, body)])
        return body

    async def serve(self) -> bytes:
        """The result. Raises ApiError."""
        if self.job.fault:
            raise self.job.fault
        assert self.job.protocol is not None
        self.protocol, model = self.job.protocol, await find_model(self.pool, self.job)
        self.model_name = model.name
        async with waiting_turn(self.pool, self.job, self.admission_lock):
            await attempt(self.admission.check, self.wait)
            if self.job.webhook:
                await attempt(lambda: check_room(self.pool.client), self.wait)
            answer = await attempt(lambda: validate_job(self.pool, self.job, model), self.wait_to_keep)
            if self.trace is not None:
                operation = self.protocol.operation
                self.trace.generation_attributes |= generation_attributes(
                    answer.requests[0], operation, answer.model
                )
                self.trace.generation_attributes |= {"gen_ai.request.choice.count": len(answer.requests)}
            await self.admit_all(answer)
        await self.send_frames(answer)
        if self.trace is not None:
            note_answer(self.trace, self.streams)
        for stream in self.streams:
            await self.admission.let_go(stream.request)
        for stream in self.streams:
            assert stream.terminal is not None
            if not stream.finished:
                raise failed(stream.terminal)
        num_records = sum(stream.num_records for stream in self.streams)
        return await offload(num_records, lambda: self.protocol.renderer(answer, self.streams).whole()[0])

    # --- admission ------------------------------------------------------------------------------------------

    async def wait(self, error: Exception) -> None:
        """Retry policy of a job: wait for a worker and for room in the queue, up to the job's deadline.
        Raises ApiError when the job is cancelled, or can never be admitted, or its API key counts no more.
        """
        if isinstance(error, ApiError) and error.error_type in NO_RETRY:
            raise error
        await self.check_cancelled()
        if self.job.terms.key:
            self.pool.keys.named(self.job.terms.key.key_id)
        await left_ms(self.pool, self.job)
        await asyncio.sleep(RETRY_PAUSE_S)

    async def wait_to_keep(self, error: Exception) -> None:
        """Retry policy of a job whose pictures the broker cannot keep yet; other errors are the job's own."""
        if isinstance(error, ApiError) and error.error_type not in ("unavailable", "overloaded"):
            raise error
        await self.wait(error)

    async def admit_all(self, answer: HttpAnswer) -> None:
        await self.check_cancelled()
        job_key = self.pool.client.keys.job(self.job.id)
        await self.admission.retry_forever(lambda: self.redis.hset(job_key, "choices", len(answer.requests)))
        for i, content in enumerate(answer.choices()):
            request = replace(
                address(self.pool.settings, self.pool.gateway, content, f"{self.job.id}#{i}", answer),
                digest=self.job.digest,
                ttl_ms=min(content.ttl_ms, await left_ms(self.pool, self.job)),
                traceparent=self.trace.generation if self.trace else "",
            )
            stream = new_stream(request, self.pool.tokenizer)
            self.streams.append(stream)
            per_prompt = 1 if request.pooling else len(answer.requests)
            await self.admit(stream, self.admission.charge(request, i, per_prompt))
        await self.check_cancelled()

    async def admit(self, stream: Stream, charge: KeyCharge | None) -> None:
        """Admit a request once there is room for it. Raises ApiError."""
        if len(encode(stream.request)) > self.pool.settings.max_queued_bytes:
            raise overloaded()
        if await attempt(lambda: self.admission.admit(stream, charge), self.wait):
            await self.subscribe_first_channel(stream)
        self.relay.filler.request_fill([stream])

    async def subscribe_first_channel(self, stream: Stream) -> None:
        """Subscribe to the channel of the gateway that admitted the request first: its events go there."""
        request_key = self.pool.client.keys.request(stream.request.request_id)
        channel: bytes | None = await self.admission.retry_forever(
            lambda: self.redis.hget(request_key, "channel")
        )
        if channel and channel.decode() != self.relay.channel:
            stream.request = replace(stream.request, channel=channel.decode())
            self.relay.follow_channel(stream.request.channel)

    async def check_cancelled(self) -> None:
        """If the job was cancelled, cancel its requests. Raises ApiError unless all of them are admitted."""
        job_key = self.pool.client.keys.job(self.job.id)
        if await self.admission.retry_forever(lambda: self.redis.hexists(job_key, "cancel")):
            for stream in self.streams:
                await self.admission.cancel(stream.request.request_id)
            if not self.streams or not self.streams[-1].admitted:
                raise failed(Terminal(self.job.id, "cancelled", 0, "cancelled: client", "cancelled"))

    # --- answer ---------------------------------------------------------------------------------------------

    async def send_frames(self, answer: HttpAnswer) -> None:
        """Send frames, from the first listener on, until the end; without a listener, wait for the end."""
        await run_until_one_ends(self.has_listener.wait(), all_ended(self.streams))
        if not self.has_listener.is_set():
            return
        async for new in self.make_frames(answer):
            self.add_frames(new)
            if not all(
                stream.terminal for stream in self.streams
            ):  # the last frames are sent with the answer
                for reply in self.replies:
                    await reply.send_new(self.frames)

    async def make_frames(self, answer: HttpAnswer) -> AsyncIterator[list[tuple[int, bytes]]]:
        """Frames with their lanes: those of the answer, or else the whole; that one only of what has
        finished.
        """
        renderer = self.protocol.renderer(answer, self.streams)
        if (feed := renderer.chunks()) is None:
            await all_ended(self.streams)
            if all(stream.finished for stream in self.streams):
                yield [(0, renderer.whole()[0])]
        else:
            async for new in feed:
                yield new

    def add_frames(self, new: Iterable[tuple[int, bytes]]) -> None:
        """Add new frames, numbered in their lanes."""
        for lane, text in new:
            self.frames.append((lane, self.num_frames[lane], text))
            self.num_frames[lane] += 1

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
    trace = RequestTrace.begin(
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
    TRACEPARENT.set(trace.generation if trace else "")
    return trace
