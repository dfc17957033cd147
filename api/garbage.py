"""Garbage: when the collector looks at the objects of a gateway.

A full collection takes some 0.1 s for a thousand live streams, and holds the event loop for as long; by
itself it comes when many streams begin. What a request leaves is freed by reference counts, so there is
little to find. So only objects of the last moments are looked at; all of them while few streams are live, or
after an hour.
"""

import asyncio
import gc
import time
from collections.abc import Callable

INTERVAL_S = 0.01
CHECK_S = 60.0
MAX_LIVE = 50
"""Streams of which a full collection takes some milliseconds."""
OVERDUE_S = 3600.0


async def collect_garbage(num_live: Callable[[], int]) -> None:
    """Collect in place of the interpreter. Never returns."""
    gc.disable()
    try:
        checked_s = collected_s = time.monotonic()
        while True:
            gc.freeze()  # what is alive by now is left alone
            await asyncio.sleep(INTERVAL_S)
            gc.collect(0)
            now_s = time.monotonic()
            if now_s - checked_s > CHECK_S:
                checked_s = now_s
                if num_live() <= MAX_LIVE or now_s - collected_s > OVERDUE_S:
                    gc.unfreeze()
                    gc.collect()
                    collected_s = now_s
    finally:
        gc.unfreeze()
        gc.enable()
