"""Waiting on a condition instead of sleeping, and loops that run meanwhile."""

import asyncio
import contextlib
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from typing import Any

FIRST_POLL_S, LAST_POLL_S = 0.01, 0.06
"""A condition may be a request over HTTP, or a list of all processes: the longer it takes, the less often it
is asked for.
"""
# more than a slow, busy machine takes for anything a test waits for: only what does not come costs it
PATIENCE_S = 90.0


async def wait_until(predicate: Callable[[], Any | Awaitable[Any]], timeout_s: float = PATIENCE_S) -> Any:
    """The predicate's first true value; it may be a coroutine function. Raises TimeoutError."""
    for pause_s in pauses(timeout_s):
        value = predicate()
        if inspect.isawaitable(value):
            value = await value
        if value:
            return value
        await asyncio.sleep(pause_s)
    raise TimeoutError(f"not within {timeout_s} s: {source(predicate)}")


async def wait_for(read: Callable[[], Any], expected: Any, timeout_s: float = PATIENCE_S) -> None:
    """Returns when what a coroutine reads is this. Raises TimeoutError."""

    async def has_come() -> bool:
        return bool(await read() == expected)

    try:
        await wait_until(has_come, timeout_s)
    except TimeoutError as error:
        raise TimeoutError(f"not {expected!r} within {timeout_s} s: {source(read)}") from error


def wait_until_sync(predicate: Callable[[], Any], timeout_s: float = PATIENCE_S) -> Any:
    """The predicate's first true value. Raises TimeoutError."""
    for pause_s in pauses(timeout_s):
        value = predicate()
        if value:
            return value
        time.sleep(pause_s)
    raise TimeoutError(f"not within {timeout_s} s: {source(predicate)}")


def pauses(timeout_s: float) -> Iterator[float]:
    """The pause after each look; the last look is one after the time is up."""
    begun_s, waited_s = time.monotonic(), 0.0
    while waited_s <= timeout_s:
        waited_s = time.monotonic() - begun_s
        yield min(FIRST_POLL_S + waited_s / 16, LAST_POLL_S)


def source(predicate: Callable[[], Any]) -> str:
    return inspect.getsource(predicate).strip() if inspect.isfunction(predicate) else repr(predicate)


@contextlib.asynccontextmanager
async def in_background(*loops: Coroutine[Any, Any, Any]) -> AsyncIterator[list[asyncio.Task[Any]]]:
    """The tasks of loops that run while the context is open; then they are cancelled."""
    tasks = [asyncio.create_task(loop) for loop in loops]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
