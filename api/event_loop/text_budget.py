"""Text budget: how much text one gateway tokenizes at once, because a byte takes some two hundred bytes of
memory until its tokens are rendered.
"""

import asyncio
import ctypes
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from api.event_loop.offload import LONG
from common.settings.fields import SettingFields

Result = TypeVar("Result")

SHORT_BYTES = 2**16
"""Texts up to this have a lane of their own, so that none of them waits for seconds behind long ones."""


class Lane:
    """Bytes of texts that are tokenized at once, first come, first served. A text that is larger than the
    lane has it alone.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def acquire(self, size: int) -> int:
        """Return the bytes that were taken, which `release` gives back."""
        size = min(size, self.max_bytes)
        turn = asyncio.get_running_loop().create_future()
        self.waiting.append((size, turn))
        self.start_next()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self.waiting.remove((size, turn))
                self.start_next()
            else:
                self.release(size)
            raise
        return size

    def release(self, size: int) -> None:
        self.num_bytes -= size
        self.start_next()

    def start_next(self) -> None:
        while self.waiting and self.num_bytes + self.waiting[0][0] <= self.max_bytes:
            size, turn = self.waiting.popleft()
            self.num_bytes += size
            turn.set_result(None)


class TextBudget:
    """Runs work on texts: short work at once, longer work in a thread, when its lane has room."""

    def __init__(self, max_bytes: int = SettingFields().max_tokenized_bytes) -> None:
        self.short = Lane(max_bytes // 4)
        self.long = Lane(max_bytes - max_bytes // 4)

    async def run(self, size: int, work: Callable[[], Result]) -> Result:
        """The result of `work` on so many bytes, or its exception. A caller that is cancelled leaves its room
        when its work has ended, because a thread cannot be stopped.
        """
        if size < LONG:
            return work()
        is_short = size <= SHORT_BYTES
        lane = self.short if is_short else self.long
        taken = await lane.acquire(size)
        thread = asyncio.ensure_future(asyncio.to_thread(work if is_short else then_trimmed(work)))
        thread.add_done_callback(lambda _: lane.release(taken))
        return await asyncio.shield(thread)


def then_trimmed(work: Callable[[], Result]) -> Callable[[], Result]:
    """The work, and then its memory goes back to the system: glibc keeps what a thread has freed for that
    thread's next work.
    """

    def run() -> Result:
        try:
            return work()
        finally:
            trim_memory()

    return run


def trim_memory() -> None:
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # glibc; others give memory back by themselves
        libc.malloc_trim(0)


def utf8_size(text: str) -> int:
    """Bytes of a text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode())
