"""Waiting on a condition instead of sleeping."""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any

POLL_S = 0.02
# more than a slow, busy machine takes for anything a test waits for: only what does not come costs it
PATIENCE_S = 90.0


async def wait_until(predicate: Callable[[], Any | Awaitable[Any]], timeout_s: float = PATIENCE_S) -> Any:
    """The predicate's first true value; it may be a coroutine function. Raises TimeoutError."""
    end_s = time.monotonic() + timeout_s
    while True:
        value = predicate()
        if inspect.isawaitable(value):
            value = await value
        if value:
            return value
        if time.monotonic() > end_s:
            raise TimeoutError(f"not within {timeout_s} s: {source(predicate)}")
        await asyncio.sleep(POLL_S)


def wait_until_sync(predicate: Callable[[], Any], timeout_s: float = PATIENCE_S) -> Any:
    """The predicate's first true value. Raises TimeoutError."""
    end_s = time.monotonic() + timeout_s
    while True:
        value = predicate()
        if value:
            return value
        if time.monotonic() > end_s:
            raise TimeoutError(f"not within {timeout_s} s: {source(predicate)}")
        time.sleep(POLL_S)


def source(predicate: Callable[[], Any]) -> str:
    return inspect.getsource(predicate).strip() if inspect.isfunction(predicate) else repr(predicate)
