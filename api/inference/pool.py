"""What the routes of one gateway share, and its life."""

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from contextvars import Context
from typing import Any, cast

from fastapi import Request

from api.inference.admission import Desk
from api.inference.capacity import Fleet
from api.inference.pools import Pools
from api.inference.relay import Relay
from api.inference.tokenizer import Vocabulary
from api.jobs.consumer import Jobs
from common.broker.client import CONNECT_TIMEOUT_S, broker_url, connect
from common.broker.keys import Keys
from common.settings.settings import Settings

log = logging.getLogger(__name__)


class Gateway:
    """The parts of a gateway that serve one pool, tied together; `name` is new at every start.

    Attributes:
        pools: from a model's name to the gateway that serves it, this one or one like it.
    """

    def __init__(
        self, settings: Settings, name: str, vocabulary: Vocabulary, lose: Callable[[], bool] | None = None
    ) -> None:
        keys = Keys(settings.pool)
        self.settings, self.vocabulary = settings, vocabulary
        self.redis = connect(broker_url(settings))
        self.relay = Relay(self.redis, keys, name, lose)
        self.fleet = Fleet(self.redis, keys, name, settings, num_streams=lambda: len(self.relay.streams))
        self.pools = Pools(self, self.redis, name)
        self.desk = Desk(self.redis, keys, name, settings, vocabulary, self.relay, self.fleet)
        self.jobs = Jobs(self, name)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["Gateway"]:
        """The gateway lives while the context is open; a broker that is away now may come later."""
        await self.fleet.look()
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(self.redis.aclose)
            stack.push_async_callback(self.fleet.leave)
            for loop in (self.relay.run(), self.fleet.run(), self.jobs.run()):
                await stack.enter_async_context(running_task(loop))
            stack.push_async_callback(self.desk.close)
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


def gateway_of(request: Request) -> Gateway:
    return cast(Gateway, request.app.state.gateway)
