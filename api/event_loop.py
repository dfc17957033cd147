"""Event loop of a gateway: no work may hold it for long, because all streams wait meanwhile.

Long work runs in slices (`Pace`, `PacedQueue`), begins in turns (`Turns`) or runs in a thread (`offload`).
Background tasks and retries stand here, too.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextvars import Context
from typing import Any, TypeVar

from api.errors import ApiError
from common.broker.client import ERRORS, FailureLog, describe_error

log = logging.getLogger(__name__)

Result = TypeVar("Result")
Policy = Callable[[Exception], Awaitable[None]]
"""Called after a failure: raises to give up, or returns when it is time for the next attempt."""

RETRY_PAUSE_S = 0.2
LONG_SIZE = 4000
"""Size of work that takes about a millisecond: characters to tokenise, bytes of JSON, or tokens to render."""
SLICE_UNITS = 32
SLICE_S = 0.001

# --- retries ------------------------------------------------------------------------------------------------


async def attempt(step: Callable[[], Awaitable[Result]], policy: Policy) -> Result:
    """Repeat `step` until it succeeds: its result, or what the policy raises after a failure. Failures are
    ApiError and the broker's errors.
    """
    while True:
        try:
            return await step()
        except (ApiError, *ERRORS) as error:
            await policy(error)


async def retry_forever(error: Exception) -> None:
    """Policy of a step that must be done, however long the broker is away."""
    log.debug("retrying after: %s", describe_error(error))
    await asyncio.sleep(RETRY_PAUSE_S)


async def repeat_forever(step: Callable[[], Awaitable[None]], name: str) -> None:
    """Run `step` again and again, whatever the broker does; its failures are logged as those of `name`."""
    failures = FailureLog(log, name)
    while True:
        with failures.caught():
            await step()
            continue
        await asyncio.sleep(RETRY_PAUSE_S)


# --- background tasks ---------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def background_task(loop: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run a loop while the context is open. If the loop ends by itself, the process exits: it could serve
    nobody any more.
    """
    # An own context: the loop belongs to no request, although one may have started it.
    task = asyncio.create_task(loop, context=Context())
    task.add_done_callback(exit_unless_cancelled)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


def exit_unless_cancelled(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        log.critical("a background task of the gateway ended", exc_info=task.exception())
        os._exit(1)  # no stream can go on; the next gateway process serves new ones


# --- long work ----------------------------------------------------------------------------------------------


async def offload(size: int, work: Callable[[], Result]) -> Result:
    """The result of `work`, or its exception; it runs in a thread from LONG_SIZE on."""
    return work() if size < LONG_SIZE else await asyncio.to_thread(work)


class Pace:
    """Pace of one loop: a slice ends after SLICE_UNITS units of work or SLICE_S seconds.

    A unit is a stream that got something: its frame is written in the same call, or by a task that has about
    as much to do. So the slice is short, and so is the work that it causes.
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
        return self.num_units >= SLICE_UNITS or time.perf_counter() - self.began_s > SLICE_S

    async def step(self, num_units: int = 1) -> None:
        """Count a piece of work. If the slice ends with it, let the other tasks have their turn."""
        if self.count(num_units):
            await asyncio.sleep(0)
            self.begin()


class PacedQueue:
    """Work in parts, done in order and in slices: at once as far as the slice goes, the rest in later turns
    of the event loop.

    A part is an iterator: each step does a piece of work and yields its units. A part costs one unit itself.

    Attributes:
        parts: those that are not done, in order.
        turn_s: the loop's time when the slice began; with uvloop it stands still within a turn.
    """

    def __init__(self) -> None:
        self.parts: deque[Iterator[int]] = deque()
        self.pace = Pace()
        self.turn_s = 0.0
        self.left_over = asyncio.Event()

    def add(self, part: Iterator[int]) -> None:
        """Add a part, and begin it unless others come before it."""
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
    """Lets `num_tasks` tasks begin in one turn of the event loop; the others wait for later turns, in a queue
    for each key. Keys are served in turn.

    Attributes:
        waiting: by key; the key whose turn it is comes first.
    """

    def __init__(self, num_tasks: int) -> None:
        self.num_tasks = num_tasks
        self.num_left = num_tasks
        self.num_waiting = 0
        self.waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    def take(self, key: str = "") -> asyncio.Future[None]:
        """A turn: it is done when the task may begin."""
        loop = asyncio.get_running_loop()
        if self.num_left == self.num_tasks:
            loop.call_soon(self.renew)
        turn = loop.create_future()
        if self.num_left:
            self.num_left -= 1
            turn.set_result(None)
        else:
            self.waiting.setdefault(key, deque()).append(turn)
            self.num_waiting += 1
        return turn

    def give(self, number: int) -> int:
        """Give up to this many turns to those that wait. Returns how many are left over."""
        while number and self.waiting:
            key, queue = self.waiting.popitem(last=False)
            turn = queue.popleft()
            self.num_waiting -= 1
            if queue:
                self.waiting[key] = queue
            if not turn.done():
                turn.set_result(None)
                number -= 1
        return number

    def renew(self) -> None:
        self.num_left = self.give(self.num_tasks)
        if self.num_left < self.num_tasks:
            asyncio.get_running_loop().call_soon(self.renew)

    def drop_oldest(self) -> None:
        """Cancel the oldest turn in the longest queue."""
        key = max(self.waiting, key=lambda one: len(self.waiting[one]))
        self.waiting[key].popleft().cancel()
        self.num_waiting -= 1
        if not self.waiting[key]:
            del self.waiting[key]
