"""Pace: long work gives way to the other tasks of the event loop.

A loop does it after each slice of its work; many tasks that begin at once take turns.
"""

import asyncio
import time
from collections import deque
from collections.abc import Iterator

MAX_UNITS = 32
MAX_S = 0.001


class Pace:
    """Pace of one loop: a slice ends after MAX_UNITS units of work or MAX_S seconds.

    A unit is a stream that got something: its frame is written in the same call, or by a task that has about
    as much to do. So both the slice and what it causes are short.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Begin a slice."""
        self.num_units = 0
        self.began_s = time.perf_counter()

    def count(self, num_units: int = 1) -> bool:
        """Count a piece of work. Returns whether the slice ends with it."""
        self.num_units += num_units
        return self.num_units >= MAX_UNITS or time.perf_counter() - self.began_s > MAX_S

    async def step(self, num_units: int = 1) -> None:
        """Call after each piece of work: returns at once, or when the other tasks have had their turn."""
        if self.count(num_units):
            await asyncio.sleep(0)
            self.begin()


class PacedQueue:
    """Work that comes in parts, each done in order and in slices: at once as far as a slice goes, the rest in
    later turns of the event loop.

    A part is an iterator that does a piece of work with each step, and yields its units; it costs one itself.

    Attributes:
        parts: those that are not done, in order.
        turn_s: the loop's time when the slice began; uvloop's stands still within a turn.
    """

    def __init__(self) -> None:
        self.parts: deque[Iterator[int]] = deque()
        self.pace = Pace()
        self.turn_s = 0.0
        self.left_over = asyncio.Event()

    def add(self, part: Iterator[int]) -> None:
        """Begin a part, unless others come before it."""
        self.parts.append(part)
        if len(self.parts) > 1:
            return
        turn_s = asyncio.get_running_loop().time()
        if turn_s != self.turn_s:
            self.turn_s = turn_s
            self.pace.begin()
        self.do_slice()

    def do_slice(self) -> None:
        while self.parts:
            for num_units in self.parts[0]:
                if self.pace.count(num_units):
                    self.left_over.set()
                    return
            self.parts.popleft()
            if self.pace.count() and self.parts:
                self.left_over.set()
                return

    async def run(self) -> None:
        """Do what is left over, in slices. Never returns."""
        while True:
            if self.left_over.is_set():
                await asyncio.sleep(0)
            else:
                await self.left_over.wait()
            self.left_over.clear()
            self.pace.begin()
            self.do_slice()


class Turns:
    """Lets `num_tasks` tasks begin in one turn of the event loop; the others queue up."""

    def __init__(self, num_tasks: int) -> None:
        self.num_tasks = num_tasks
        self.num_left = num_tasks
        self.waiting: deque[asyncio.Future[None]] = deque()

    async def wait_turn(self) -> None:
        """Return when the task may begin."""
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
