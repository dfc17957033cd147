"""One job in the hands of a gateway, which acts as its client: admits it, tells its frames, and leaves its
answer.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any, Protocol

from redis.exceptions import ResponseError

from api.errors import (
    ApiError,
    Family,
    conflict,
    failed,
    internal_error,
    model_not_found,
    overloaded,
    unavailable,
)
from api.http.disconnect import all_ended
from api.inference import metrics
from api.inference.admission import PAUSE_S
from api.inference.pool import Pool
from api.inference.pools import ANY_MODEL, model_names
from api.inference.stream import Stream
from api.jobs.job import Job
from api.jobs.reply import Frame, Reply
from api.json import to_json
from api.offload import offload
from common.broker.client import ERRORS, describe_error
from common.broker.keys import RESULT_TTL_MS
from common.messages.codec import encode as pack
from common.messages.events import Terminal
from common.messages.request import Generate
from common.settings.settings import Settings

log = logging.getLogger(__name__)

MORE_FRAMES = 8
"""Of a choice, besides one for each token."""
MANY_FRAMES = 2**20
"""More than there can be, as long as it is not known what is asked for."""


class AcceptedJob(Protocol):
    """What a job asks for, found valid, in the shapes of one API.

    Attributes:
        requests: one for each choice, without ids yet.
    """

    @property
    def requests(self) -> list[Generate]: ...

    def frames(self, streams: list[Stream]) -> AsyncIterator[list[Frame]]:
        """Every frame of every choice, as soon as it is there."""

    def answer(self, streams: list[Stream]) -> bytes:
        """The body that HTTP would give without streaming; all streams have finished."""


Accept = Callable[[Pool, Job], Awaitable[AcceptedJob]]
"""Finds a job valid, or raises ApiError."""


class JobRun:
    """A job from its admission to its answer.

    Attributes:
        frames: all that have been made so far; nobody makes them until a reply has listeners.
        ended: set when the answer stands, or nobody here gives it.
    """

    def __init__(self, pool: Pool, job: Job, door: asyncio.Lock) -> None:
        self.pool, self.job, self.door = pool, job, door
        self.keys, self.admission, self.relay = pool.admission.keys, pool.admission, pool.relay
        self.redis: Any = pool.redis
        self.replies: list[Reply] = []
        self.heard, self.ended = asyncio.Event(), asyncio.Event()
        self.frames: list[Frame] = []
        self.max_frames = MANY_FRAMES
        self.streams: list[Stream] = []

    def join(self, reply: Reply) -> None:
        """Another entry asks for the same: it hears all of it."""
        self.replies.append(reply)
        if reply.has_listeners:
            self.heard.set()

    async def run(self, accept: Accept, family: Family) -> None:
        """Returns when the job is answered, well or not."""
        answer = await self.outcome(accept, family)
        request_ids = [stream.request.request_id for stream in self.streams]
        for reply in self.replies:
            await reply.finish(self.frames, self.max_frames, answer, request_ids)

    async def outcome(self, accept: Accept, family: Family) -> bytes:
        """The answer or the error; that is the last frame as well, unless it has been one already."""
        try:
            return await self.serve(accept)
        except ApiError as error:
            metrics.count_error(error.status, error.error_type)
            body = to_json(family(error)[1])
        except Exception:
            log.exception("job %s", self.job.id)
            body = to_json(family(internal_error())[1])
        if all(text != body for _, _, text in self.frames):
            self.frames.append((0, sum(lane == 0 for lane, _, _ in self.frames), body))
        return body

    async def serve(self, accept: Accept) -> bytes:
        """The answer. Raises ApiError."""
        if self.job.fault:
            raise self.job.fault
        check_model(self.job, self.pool.settings)
        async with self.door:
            await self.served()
            order: AcceptedJob = await accept(self.pool, self.job)
            await self.admit_all(order.requests)
        self.max_frames = sum(request.stopping.max_new_tokens + MORE_FRAMES for request in order.requests)
        await self.tell(order)
        for stream in self.streams:
            assert stream.terminal is not None
            if not stream.finished:
                raise failed(stream.terminal)
        return await offload(
            sum(stream.num_records for stream in self.streams), lambda: order.answer(self.streams)
        )

    # --- admission ------------------------------------------------------------------------------------------

    async def served(self) -> None:
        """Returns when somebody could serve the job: it waits as long as it takes. Raises ApiError when it is
        called off.
        """
        while True:
            try:
                return await self.admission.check()
            except ApiError:
                await self.check_wanted()
                await asyncio.sleep(PAUSE_S)

    async def admit_all(self, requests: list[Generate]) -> None:
        await self.check_wanted()
        job_key = self.keys.job(self.job.id)
        await self.admission.retry_forever(lambda: self.redis.hset(job_key, "choices", len(requests)))
        for i, content in enumerate(requests):
            request = replace(
                self.admission.address(content, f"{self.job.id}#{i}"),
                digest=self.job.digest,
                gateway="",
                grace_ms=0,
                result_ttl_ms=RESULT_TTL_MS,
            )
            stream = Stream(request, self.pool.tokenizer)
            self.streams.append(stream)
            self.relay.add(stream)
            await self.admit(stream)
        await self.check_wanted()

    async def admit(self, stream: Stream) -> None:
        """Returns when the fleet has the request, however long there is no room for it. Raises ApiError."""
        if len(pack(stream.request)) > self.pool.settings.max_queued_bytes:
            raise overloaded()
        while (answer := await self.try_admit(stream.request)) not in (b"admitted", b"attached"):
            if answer == b"conflict":
                raise conflict("request")
            await self.check_wanted()
            await asyncio.sleep(PAUSE_S)
        if answer == b"attached":
            await self.follow(stream)
        self.relay.admitted(stream)
        self.relay.request_fill([stream])

    async def try_admit(self, request: Generate) -> bytes:
        try:
            return await self.admission.admit_command(request)
        except ERRORS as error:
            if isinstance(error, ResponseError) and "WRONGTYPE" in str(
                error
            ):  # somebody wrote to our keys: that does not pass
                raise unavailable(describe_error(error)) from error
            return b""

    async def follow(self, stream: Stream) -> None:
        """What is said about the request goes to whoever admitted it first."""
        home = self.keys.request(stream.request.request_id)
        channel: bytes | None = await self.admission.retry_forever(lambda: self.redis.hget(home, "channel"))
        if channel and channel.decode() != self.relay.channel:
            stream.request = replace(stream.request, channel=channel.decode())
            self.relay.follow(stream.request.channel)

    async def check_wanted(self) -> None:
        """Raises ApiError when the job has been called off; what has been admitted of it is cancelled."""
        key = self.keys.job(self.job.id)
        if await self.admission.retry_forever(lambda: self.redis.hexists(key, "cancel")):
            for stream in self.streams:
                await self.admission.cancel(stream.request.request_id)
            if not self.streams or not self.streams[-1].admitted:
                raise failed(Terminal(self.job.id, "cancelled", 0, "cancelled: client", "cancelled"))

    # --- answer ---------------------------------------------------------------------------------------------

    async def tell(self, order: AcceptedJob) -> None:
        """Tells frames for as long as there are any; without listeners it only waits for the end."""
        if not await self.has_listeners():
            return
        async for new in order.frames(self.streams):
            self.frames += new
            if not all(
                stream.terminal for stream in self.streams
            ):  # the last ones are told together with the answer
                for reply in self.replies:
                    await reply.say(self.frames, self.max_frames)

    async def has_listeners(self) -> bool:
        """Whether anybody listens, or came to listen before all was over."""
        tasks = {asyncio.create_task(self.heard.wait()), asyncio.create_task(all_ended(self.streams))}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
        return self.heard.is_set()

    async def detach(self) -> None:
        """Forgets the streams, here and nowhere else: should the job not be answered, another gateway goes on
        with them.
        """
        for stream in self.streams:  # all of them at once: the next run of this job may begin with the same
            self.relay.remove(stream)
        self.ended.set()
        for stream in self.streams:
            if stream.terminal:
                metrics.count_stream(stream, self.pool.workers.limits)
            if stream.request.channel != self.relay.channel:
                self.relay.unfollow(stream.request.channel)


def check_model(job: Job, settings: Settings) -> None:
    """Raises ApiError (404): a pool has its own stream of jobs."""
    model = job.body and job.body.model
    if model not in ANY_MODEL and model not in model_names(settings):
        text = f"The model `{model}` is not served here: a job goes to the stream of its own pool"
        raise model_not_found(text)
