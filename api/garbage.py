"""Garbage: when the collector looks at all objects of a gateway.

A full collection takes some 0.1 s for a thousand live streams, and holds the event loop for as long. What a
request leaves is freed by reference counts, so there is little to find: it is done while few streams are
live, or after an hour.
"""

import asyncio
import gc
import time
from collections.abc import Callable

CHECK_S = 60.0
MAX_LIVE = 50
"""Streams of which a full collection takes some milliseconds."""
OVERDUE_S = 3600.0
YOUNG, MIDDLE, NEVER = 500, 5, 2**30
"""Thresholds of the three generations: young objects are collected in short steps, old ones never by
themselves.
"""


async def collect_when_idle(num_live: Callable[[], int]) -> None:
    """Never returns."""
    gc.collect()
    gc.freeze()  # what the start has made stays until the end
    gc.set_threshold(YOUNG, MIDDLE, NEVER)
    collected_s = time.monotonic()
    while True:
        await asyncio.sleep(CHECK_S)
        if num_live() <= MAX_LIVE or time.monotonic() - collected_s > OVERDUE_S:
            gc.collect()
            collected_s = time.monotonic()
