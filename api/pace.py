"""Pace: a long loop gives way to the other tasks of the event loop after each slice of its work."""

import asyncio
import time

MAX_UNITS = 64
MAX_S = 0.002


class Pace:
    """Pace of one loop: a slice ends after MAX_UNITS units of work or MAX_S seconds.

    A unit is a stream that got something: its reader then has about as much to do. So both the slice and what
    it causes are short.
    """

    def __init__(self) -> None:
        self.num_units = 0
        self.began_s = time.perf_counter()

    async def step(self, num_units: int = 1) -> None:
        """Call after each piece of work: returns at once, or when the other tasks have had their turn."""
        self.num_units += num_units
        if self.num_units >= MAX_UNITS or time.perf_counter() - self.began_s > MAX_S:
            await asyncio.sleep(0)
            self.num_units = 0
            self.began_s = time.perf_counter()
