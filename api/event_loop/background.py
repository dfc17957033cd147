"""Background tasks: loops that run for as long as the gateway, or one of its pools, is open."""

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Coroutine
from contextvars import Context
from typing import Any

log = logging.getLogger(__name__)


@contextlib.asynccontextmanager
async def background_task(loop: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run a loop while the context is open. If the loop ends by itself, so does the process: it could serve
    nobody any more.
    """
    # A context of its own: the loop serves no single request, although one may have started it.
    task = asyncio.create_task(loop, context=Context())
    task.add_done_callback(exit_unless_cancelled)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


def exit_unless_cancelled(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        log.critical("a background task of the gateway ended", exc_info=task.exception())
        os._exit(1)  # no stream can go on; the next gateway process serves new ones
