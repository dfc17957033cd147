"""Loop watch: measures for how long a gateway's event loop is held.

While one task works, all streams wait. So long work goes in slices (`api/event_loop/pace.py`) or in a thread
(`api/event_loop/offload.py`), and this metric shows where neither was done.
"""

import asyncio
import time

from common.beats import until_beat
from common.metrics.catalogue import LOOP_HOLD

INTERVAL_S = 0.1
"""A timer wakes the process, which costs some 100 µs where caches are cold, also without requests. A shorter
hold is seen if a timer was due in it: as often as anything else that came would have had to wait.
"""


async def watch_loop() -> None:
    """Observe how late a timer is, and how much of that is work of this thread. Never returns."""
    while True:
        began_s, began_cpu_s, pause_s = time.perf_counter(), time.thread_time(), until_beat(INTERVAL_S)
        await asyncio.sleep(pause_s)
        held_s = max(0.0, time.perf_counter() - began_s - pause_s)
        LOOP_HOLD.observe(held_s, "wall")
        LOOP_HOLD.observe(min(held_s, time.thread_time() - began_cpu_s), "cpu")
