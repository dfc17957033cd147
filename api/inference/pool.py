"""Pool: everything through which a gateway reaches the workers of one pool."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from api.background import background_task
from api.inference.admission import Admission
from api.inference.batcher_monitor import BatcherMonitor
from api.inference.capacity import WorkerMonitor
from api.inference.relay import Relay
from api.inference.tokenizer import ModelTokenizer
from common.broker.client import CONNECT_TIMEOUT_S, broker_url, connect
from common.broker.keys import Keys
from common.settings.settings import Settings


class Pool:
    """Connection, tokenizer, relay, monitors and admission of one pool.

    Attributes:
        gateway: incarnation of this gateway; new at every start.
    """

    def __init__(
        self,
        settings: Settings,
        gateway: str,
        tokenizer: ModelTokenizer,
        lose: Callable[[], bool] | None = None,
    ) -> None:
        self.settings = settings
        self.gateway = gateway
        self.tokenizer = tokenizer
        self.keys = Keys(settings.pool)
        self.redis = connect(broker_url(settings))
        self.relay = Relay(self.redis, self.keys, gateway, lose)
        self.workers = WorkerMonitor(
            self.redis, self.keys, gateway, settings, num_streams=lambda: len(self.relay.streams)
        )
        self.batcher = BatcherMonitor(self.redis, self.keys, settings)
        self.admission = Admission(
            self.redis, self.keys, gateway, settings, tokenizer, self.relay, self.workers, self.batcher
        )

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["Pool"]:
        """Serve requests while the context is open. The broker may be unreachable at first and come later."""
        await self.workers.refresh()
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(self.redis.aclose)
            stack.push_async_callback(self.workers.remove_heartbeat)
            for loop in (self.relay.run(), self.workers.run(), self.batcher.run()):
                await stack.enter_async_context(background_task(loop))
            stack.push_async_callback(self.admission.close)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.relay.subscribed.wait(), CONNECT_TIMEOUT_S)
            yield self
