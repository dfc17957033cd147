"""Lifecycle: what a gateway process runs, and the order in which it starts and stops."""

import contextlib
from collections.abc import AsyncIterator, Callable, Collection
from functools import partial

from api.event_loop import background_task, offload
from api.http.access_log import AccessLog, AuditLog
from api.http.connection_limits import ConnectionLimits
from api.http.key_ring import KeyRing
from api.http.unread import UnreadAnswers
from api.jobs.batch_run import BatchRunner
from api.jobs.consumer import JobConsumer
from api.jobs.files import FileStore, open_store
from api.prompts.tokenizer import ModelTokenizer
from api.protocols.response_object import ResponseObjectRenderer
from api.requests.pool import Pool
from api.requests.pool_registry import PoolRegistry
from api.resume import attach
from api.resume.look_up import ask_broker
from api.webhooks import WebhookSender
from common.broker.client import ERRORS, broker_url
from common.process.event_loop import collect_garbage
from common.settings.settings import Settings


class Gateway:
    """One gateway: its own pool, the registry of pools that clients name, and the consumer of its own pool's
    jobs.
    """

    def __init__(
        self,
        settings: Settings,
        incarnation: str,
        tokenizer: ModelTokenizer,
        lose: Callable[[], bool] | None = None,
    ) -> None:
        """Raises SettingError."""
        self.settings = settings
        self.keys = KeyRing(settings)
        self.pool = Pool(settings, incarnation, tokenizer, self.keys, lose)
        self.keys.clock = self.pool.client.clock
        self.pools = PoolRegistry(self.pool)
        self.access = AccessLog(settings.access_log_rate, AuditLog.open(settings, incarnation))
        self.job_consumer = JobConsumer(self.pool, self.access)
        self.webhooks = WebhookSender(self.pool.client, settings, partial(ended_status, self.pools))
        self.files = open_store(settings, self.pool.client.clock)
        self.unread = UnreadAnswers()
        self.limits = ConnectionLimits()

    def show_draining(self) -> None:
        """Say in heartbeats that the gateway drains: a batcher that shuts down too then waits for its
        streams.
        """
        self.pool.workers.state = "draining"

    def fail_streams(self) -> None:
        """End the streams of clients with an error, which cancels their requests. Jobs go on at other
        gateways.
        """
        for pool in self.pools.all():
            for stream in list(pool.relay.streams.values()):
                if stream.request.gateway and not (stream.terminal or stream.left):
                    stream.fail("the gateway shut down before the answer was finished", "shutdown")

    def end_requests(self, key_ids: Collection[str]) -> None:
        """End the requests of keys that count no more."""
        for pool in self.pools.all():
            pool.admission.end_requests(key_ids)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["Gateway"]:
        """Serve while the context is open. Other pools are closed first, the gateway's own last."""
        with contextlib.suppress(*ERRORS):
            await self.keys.refresh(self.pool.client)
        async with (
            background_task(self.unread.watch()),
            self.pool.running(),
            background_task(self.keys.watch(self.pool.client, self.end_requests)),
            background_task(self.job_consumer.run()),
            background_task(self.webhooks.run()),
            serving_batches(self.files, self.job_consumer),
            contextlib.aclosing(self.pools),
            background_task(self.pools.run()),
            background_task(collect_garbage(lambda: len(self.pool.relay.streams))),
        ):
            yield self


@contextlib.asynccontextmanager
async def serving_batches(files: FileStore | None, consumer: JobConsumer) -> AsyncIterator[None]:
    """Serve batches while the context is open, where there is a place for files."""
    if files is None:
        yield
        return
    async with background_task(BatchRunner(files, consumer).run()):
        yield


# --- response status ----------------------------------------------------------------------------------------


async def ended_status(pools: PoolRegistry, response_id: str) -> str:
    """The status of a response of the gateway's own pool; empty if it is not kept. Raises ApiError (503)."""
    own, request_id = pools.own, response_id.removeprefix("resp_")
    found = await ask_broker(pools, broker_url(own.settings), [own.settings.pool], request_id)
    if found is None or found.answer.response is None:
        return ""
    [stream] = await attach.read_committed(own, found.answer, found.channel)
    if stream.terminal is None:
        return ""
    renderer = ResponseObjectRenderer(found.answer, [stream])
    status: str = (await offload(stream.num_records, renderer.render_so_far))["status"]
    return status
