"""Reply: sends frames of a job to a channel and to a stream, and its whole answer to `result:{id}`. Frames
are numbered, so that each is sent once even if two gateways serve the job.
"""

import logging
from collections.abc import Sequence

from api.errors import ApiError
from api.jobs import scripts as job_scripts
from api.jobs.job import Job
from api.jobs.scripts import FRAMES_LOST, GOES_ON, JobEnding
from api.json import to_json
from api.requests.pool import Pool
from common.broker.keys import RESULT_TTL_MS

log = logging.getLogger(__name__)

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
        self.settings = pool.settings
        self.job = job
        self.channel = self.keys.channel(job.reply_to) if job.reply_to else ""
        self.num_sent = 0

    async def register(self) -> str:
        """Register the entry's job. Returns `live`, `ended` (answered again) or `conflict`."""
        job = self.job
        call = job_scripts.register_job(
            self.keys,
            job.id,
            digest=job.digest,
            tenant=job.terms.tenant if job.terms.key else "",
            webhook=job.webhook,
            channel=self.channel,
            in_stream=job.in_stream,
        )
        return await self.retry_forever(lambda: self.client.run(call))

    async def send_new(self, frames: list[Frame], max_frames: int) -> None:
        """Send the frames that are not sent yet; the job has at most `max_frames`."""
        if self.job.has_listeners and len(frames) > self.num_sent:
            await self.send(frames, max_frames)
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
        max_frames: int,
        answer: bytes = b"",
        request_ids: Sequence[str] = (),
        ending: JobEnding = GOES_ON,
    ) -> None:
        """Send the new frames, or all of them if the broker has lost some. The answer is sent together with
        the last frames: after the last frame a client finds it.
        """

        async def send_from(first: int) -> int:
            call = job_scripts.reply(
                self.keys,
                self.job.id,
                channel=self.channel,
                max_entries=max_frames * self.job.in_stream,
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
