"""Beats: instants at which the tasks of a process do what they do at intervals, so that one wake is enough.

A wake costs some 100 µs where caches are cold, and a process has a dozen such tasks.

First end: coroutines that run until one of them ends.

Garbage: when the collector looks at the objects of a gateway or a batcher.

A full collection takes some 0.1 s for a thousand live streams, and holds the event loop for as long; by
itself it comes when many streams begin. What a request leaves is freed by reference counts, so there is
little to find. So each object is looked at once, soon after it was made; all of them while few streams are
live, or after an hour. A batcher that takes over 16,000 requests spent a sixth of its time looking.
"""

import asyncio
import gc
import time
from collections.abc import Callable, Coroutine
from typing import Any


def until_beat(interval_s: float) -> float:
    """Seconds until the monotonic clock shows a multiple of the interval, at least a tenth of it: a timer may
    be early.
    """
    left_s = interval_s - time.monotonic() % interval_s
    return left_s if left_s > interval_s / 10 else left_s + interval_s


async def run_until_one_ends(*coroutines: Coroutine[Any, Any, object]) -> None:
    """Return when the first one has returned, or raise what it raised; the others are cancelled."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


MAX_YOUNG = 2000
"""New objects after which they are looked at: it takes some 0.1 ms."""
NEVER = 2**31 - 1
CHECK_S = 60.0
MAX_LIVE = 50
"""Streams, or requests, of which a full collection takes some milliseconds."""
OVERDUE_S = 3600.0


async def collect_garbage(num_live: Callable[[], int]) -> None:
    """Have the interpreter look at new objects only, and at all of them when that harms nobody. Never
    returns.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(MAX_YOUNG, NEVER, NEVER)
    try:
        collected_s = time.monotonic()
        while True:
            await asyncio.sleep(CHECK_S)
            if num_live() <= MAX_LIVE or time.monotonic() - collected_s > OVERDUE_S:
                gc.collect()
                collected_s = time.monotonic()
    finally:
        gc.set_threshold(*thresholds)
