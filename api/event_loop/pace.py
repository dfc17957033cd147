"""Pace: long work gives way to the other tasks of the event loop.

A loop does it after each slice of its work; many tasks that begin at once take turns.
"""

import asyncio
import time
from collections import deque

MAX_UNITS = 32
MAX_S = 0.001


class Pace:
    """Pace of one loop: a slice ends after MAX_UNITS units of work or MAX_S seconds.

    A unit is a stream that got something: its frame is written in the same call, or by a task that has about
    as much to do. So both the slice and what it causes are short.
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


class Turns:
    """Lets `num_tasks` tasks begin in one turn of the event loop; the others queue up."""

    def __init__(self, num_tasks: int) -> None:
        self.num_tasks = self.num_left = num_tasks
        self.waiting: deque[asyncio.Future[None]] = deque()

    async def take(self) -> None:
        """Returns when the task may begin."""
        loop = asyncio.get_running_loop()
        if self.num_left == self.num_tasks:
            loop.call_soon(self.renew)
        if self.num_left:
            self.num_left -= 1
        else:
            self.waiting.append(loop.create_future())
            await self.waiting[-1]

    def renew(self) -> None:
        """Begin the next turn."""
        self.num_left = self.num_tasks
        while self.waiting and self.num_left:
            future = self.waiting.popleft()
            if not future.done():
                future.set_result(None)
                self.num_left -= 1
        if self.num_left < self.num_tasks:
            asyncio.get_running_loop().call_soon(self.renew)
