"""What the routes of one gateway share, and its life."""

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from contextvars import Context
from typing import Any, cast

from fastapi import Request

from api.inference.admission import Admission
from api.inference.capacity import WorkerMonitor
from api.inference.pools import PoolRegistry
from api.inference.relay import Relay
from api.inference.tokenizer import ModelTokenizer
from api.jobs.consumer import JobConsumer
from common.broker.client import CONNECT_TIMEOUT_S, broker_url, connect
from common.broker.keys import Keys
from common.settings.settings import Settings

log = logging.getLogger(__name__)


class Pool:
    """The parts of a gateway that serve one pool, tied together; `name` is new at every start.

    Attributes:
        pools: from a model's name to the gateway that serves it, this one or one like it.
    """

    def __init__(
        self, settings: Settings, name: str, tokenizer: ModelTokenizer, lose: Callable[[], bool] | None = None
    ) -> None:
        keys = Keys(settings.pool)
        self.settings, self.tokenizer = settings, tokenizer
        self.redis = connect(broker_url(settings))
        self.relay = Relay(self.redis, keys, name, lose)
        self.workers = WorkerMonitor(
            self.redis, keys, name, settings, num_streams=lambda: len(self.relay.streams)
        )
        self.pools = PoolRegistry(self, self.redis, name)
        self.admission = Admission(self.redis, keys, name, settings, tokenizer, self.relay, self.workers)
        self.job_consumer = JobConsumer(self, name)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["Pool"]:
        """The gateway lives while the context is open; a broker that is away now may come later."""
        await self.workers.look()
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(self.redis.aclose)
            stack.push_async_callback(self.workers.remove_heartbeat)
            for loop in (self.relay.run(), self.workers.run(), self.job_consumer.run()):
                await stack.enter_async_context(running_task(loop))
            stack.push_async_callback(self.admission.close)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.relay.subscribed.wait(), CONNECT_TIMEOUT_S)
            stack.push_async_callback(self.pools.close)
            yield self


@contextlib.asynccontextmanager
async def running_task(loop: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """A loop that runs while the context is open. Should it end by itself, so does this process: nobody would
    be served.
    """
    task = asyncio.create_task(
        loop, context=Context()
    )  # it serves no single request, though one may have caused its start
    task.add_done_callback(end_with)
    yield
    task.cancel()
    await asyncio.wait([task])


def end_with(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        log.critical("a loop of the gateway ended", exc_info=task.exception())
        os._exit(1)  # no stream can go on; its successor serves the next ones


def pool_of(request: Request) -> Pool:
    return cast(Pool, request.app.state.gateway)
