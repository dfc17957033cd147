"""Lifecycle: what a gateway process runs, and the order in which it starts and stops."""

import contextlib
from collections.abc import AsyncIterator, Callable

from api.event_loop import background_task, watch_loop
from api.http.access_log import AccessLog
from api.http.connection_limits import ConnectionLimits
from api.http.unread import UnreadAnswers
from api.jobs.consumer import JobConsumer
from api.prompts.tokenizer import ModelTokenizer
from api.requests.pool import Pool
from api.requests.pool_registry import PoolRegistry
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
        self.settings = settings
        self.pool = Pool(settings, incarnation, tokenizer, lose)
        self.pools = PoolRegistry(self.pool)
        self.access = AccessLog(settings.access_log_rate)
        self.job_consumer = JobConsumer(self.pool, self.access)
        self.unread = UnreadAnswers(settings)
        self.limits = ConnectionLimits(settings)

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

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["Gateway"]:
        """Serve while the context is open. Other pools are closed first, the gateway's own last."""
        async with (
            background_task(watch_loop()),
            background_task(self.unread.watch()),
            self.pool.running(),
            background_task(self.job_consumer.run()),
            contextlib.aclosing(self.pools),
            background_task(self.pools.run()),
            background_task(collect_garbage(lambda: len(self.pool.relay.streams))),
        ):
            yield self
