"""Reply: sends the answer to a job: frames to a channel and to a stream, the whole answer to `result:{id}`.

Frames are numbered, so that each is sent once, even if two gateways serve the job.
"""

import logging
from collections.abc import Sequence
from typing import Any

from api.errors import ApiError
from api.inference.pool import Pool
from api.jobs.job import Job
from api.json import to_json
from common.broker.keys import JOB_TTL_MS, RESULT_TTL_MS

log = logging.getLogger(__name__)

Frame = tuple[int, int, bytes]
"""Lane, index in its lane, text. Every gateway makes the same frames for a lane; lanes may mix in any order.
"""

NOT_A_JOB, FRAMES_LOST = -1, -2
"""What `reply` answers where it sends nothing."""
REQUEST_TTL_MS = 60_000
"""Time for which the keys of an answered request are kept, for another gateway that still serves the job."""


class Reply:
    """Answers one entry of `submit`.

    Attributes:
        num_sent: frames of the job that this reply has sent.
    """

    def __init__(self, pool: Pool, job: Job) -> None:
        self.client = pool.client
        self.keys = keys = pool.client.keys
        self.retry_forever = pool.admission.retry_forever
        self.job = job
        self.channel = keys.channel(job.reply_to) if job.reply_to else ""
        self.own_keys = [keys.job(job.id), keys.reply(job.id), keys.result(job.id)]
        self.num_sent = 0

    async def register(self) -> str:
        """Register the entry's job: `live`, `ended`, `conflict` or `spoiled`. An ended job is answered
        again.
        """
        args: list[str | int] = [
            self.job.digest,
            JOB_TTL_MS,
            self.channel,
            int(self.job.in_stream),
            RESULT_TTL_MS,
        ]
        answer: bytes = await self.retry_forever(
            lambda: self.client.run("jobs/register_job", self.own_keys[:2], args)
        )
        return answer.decode()

    async def send_new(self, frames: list[Frame], max_frames: int) -> None:
        """Send those of the job's frames that are not sent yet; the job has at most `max_frames` in all."""
        if self.job.has_listeners and len(frames) > self.num_sent:
            await self.send(frames, max_frames)
        self.num_sent = len(frames)

    async def send_error(self, error: ApiError, result_id: str) -> None:
        """Answer this entry alone; the record of a job with its id does not change."""
        body = to_json(self.job.family(error)[1])

        async def command() -> None:
            async with self.client.redis.pipeline() as pipe:
                pipe.set(self.keys.result(result_id), body, px=RESULT_TTL_MS)
                if self.channel:
                    pipe.publish(self.channel, body)
                await pipe.execute()

        await self.retry_forever(command)

    async def send(
        self, frames: list[Frame], max_frames: int, answer: bytes = b"", request_ids: Sequence[str] = ()
    ) -> None:
        """Send what is new of the frames; where the broker has lost frames, send all of them. The answer
        goes together with the last frames: after the last frame a client finds it.
        """
        request_keys = [
            key
            for request_id in request_ids
            for key in (self.keys.request(request_id), self.keys.tokens(request_id))
        ]
        head: list[Any] = [
            self.channel,
            max_frames * self.job.in_stream,
            RESULT_TTL_MS,
            REQUEST_TTL_MS,
            JOB_TTL_MS,
            answer,
        ]

        async def send_from(first: int) -> int:
            args = [*head, self.num_sent - first, *(part for frame in frames[first:] for part in frame)]
            answered: int = await self.retry_forever(
                lambda: self.client.run("jobs/reply", [*self.own_keys, *request_keys], args)
            )
            return answered

        answered = await send_from(self.num_sent)
        if answered == FRAMES_LOST:
            log.warning("job %s: the broker has lost frames: all are sent again", self.job.id)
            answered = await send_from(0)
        if answered == NOT_A_JOB:
            log.error("job %s: %s is not a job's key; the answer is lost", self.job.id, self.own_keys[0])
