"""Loop watch: measures for how long a gateway's event loop is held.

While one task works, all streams wait. So long work goes in slices (`api/event_loop/pace.py`) or in a thread
(`api/event_loop/offload.py`), and this metric shows where neither was done.
"""

import asyncio
import time

from common.metrics.catalogue import LOOP_HOLD

INTERVAL_S = 0.02
"""Each timer costs some 20 µs, for a gateway without requests as well."""


async def watch_loop() -> None:
    """Observe how late a timer is, and how much of that is work of this thread. Never returns."""
    while True:
        began_s, began_cpu_s = time.perf_counter(), time.thread_time()
        await asyncio.sleep(INTERVAL_S)
        held_s = max(0.0, time.perf_counter() - began_s - INTERVAL_S)
        LOOP_HOLD.observe(held_s, "wall")
        LOOP_HOLD.observe(min(held_s, time.thread_time() - began_cpu_s), "cpu")
