"""Event loop: intervals, tasks that end together, and the garbage collector."""

import asyncio
import gc
import time
from collections.abc import Callable, Coroutine
from typing import Any

MAX_YOUNG_OBJECTS = 2000
"""New objects after which the collector looks at them, which takes some 0.1 ms."""
NEVER = 2**31 - 1
CHECK_S = 60.0
MAX_LIVE = 50
"""Live streams, or requests, with which a full collection takes some milliseconds."""
OVERDUE_S = 3600.0
"""Time after which a full collection runs whatever is live."""


def until_beat(interval_s: float) -> float:
    """Return the seconds until the monotonic clock shows a multiple of the interval.

    So tasks with intervals share a wake, which costs some 100 µs where caches are cold; a process has a dozen
    such tasks. The result is at least a tenth of the interval, since a timer may be early.
    """
    left_s = interval_s - time.monotonic() % interval_s
    return left_s if left_s > interval_s / 10 else left_s + interval_s


async def run_until_one_ends(*coroutines: Coroutine[Any, Any, object]) -> None:
    """Return when the first one returns, or raise its error; the others are cancelled."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


async def collect_garbage(num_live: Callable[[], int]) -> None:
    """Collect new objects only, and all of them while few streams are live or after an hour. Never returns.

    A full collection holds the event loop for some 0.1 s with a thousand live streams, and by itself it comes
    when many streams begin. Reference counts free what a request leaves, so there is little to find. A
    batcher that took over 16,000 requests spent a sixth of its time on it.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(MAX_YOUNG_OBJECTS, NEVER, NEVER)
    try:
        collected_s = time.monotonic()
        while True:
            await asyncio.sleep(CHECK_S)
            if num_live() <= MAX_LIVE or time.monotonic() - collected_s > OVERDUE_S:
                gc.collect()
                collected_s = time.monotonic()
    finally:
        gc.set_threshold(*thresholds)
