"""Where the answer to a job goes: frames to a channel and a stream, each once, whoever says them; the whole
to `result:{id}`.
"""

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from redis.asyncio import Redis

from api.jobs.job import Job
from common.broker.client import script
from common.broker.keys import JOB_TTL_MS, RESULT_TTL_MS, Keys

log = logging.getLogger(__name__)

Frame = tuple[int, int, bytes]
"""Lane, index in its lane, text. The frames of a lane are the same whoever makes them; lanes may mingle in
any order.
"""
Insist = Callable[[Callable[[], Awaitable[Any]]], Awaitable[Any]]

KEPT_MS = 60_000
"""The fleet's own record of an answered request, for another gateway that still tells it."""


class Reply:
    """Speaks for one entry of `submit`.

    Attributes:
        num_said: frames of the job that have been said here.
    """

    def __init__(self, redis: Redis, keys: Keys, retry_forever: Insist, job: Job) -> None:
        self.keys, self.retry_forever, self.job = keys, retry_forever, job
        self.channel = keys.channel(job.reply_to) if job.reply_to else ""
        self.own_keys = [keys.job(job.id), keys.reply(job.id), keys.result(job.id)]
        self.register_script, self.reply_script = script(redis, "register_job"), script(redis, "reply")
        self.num_said = 0

    @property
    def has_listeners(self) -> bool:
        return bool(self.channel or self.job.in_stream)

    async def register(self) -> str:
        """`live`, `ended`, `conflict` or `spoiled`; what has ended is said again."""
        args = [self.job.digest, JOB_TTL_MS, self.channel, int(self.job.in_stream), RESULT_TTL_MS]
        answer: bytes = await self.retry_forever(
            lambda: self.register_script(keys=self.own_keys[:2], args=args)
        )
        return answer.decode()

    async def say(self, frames: list[Frame], max_frames: int) -> None:
        """All frames of the job so far, of which it says the new ones; there will be no more than
        `max_frames`.
        """
        new, self.num_said = frames[self.num_said :], len(frames)
        if new and self.has_listeners:
            await self.send(new, max_frames, b"")

    async def finish(
        self, frames: list[Frame], max_frames: int, answer: bytes, request_ids: list[str]
    ) -> None:
        """The last frames, and with them the answer: it stands there when the last frame is heard."""
        new, self.num_said = frames[self.num_said :], len(frames)
        await self.send(new, max_frames, answer, request_ids)

    async def send(
        self, frames: list[Frame], max_frames: int, answer: bytes, request_ids: list[str] | None = None
    ) -> None:
        others = [key for one in request_ids or [] for key in (self.keys.request(one), self.keys.result(one))]
        args: list[Any] = [
            self.channel,
            max_frames * self.job.in_stream,
            RESULT_TTL_MS,
            KEPT_MS,
            JOB_TTL_MS,
            answer,
        ]
        args += [part for frame in frames for part in frame]
        if await self.retry_forever(lambda: self.reply_script(keys=[*self.own_keys, *others], args=args)) < 0:
            log.error("job %s: %s is none of our keys; its answer is lost", self.job.id, self.own_keys[0])
