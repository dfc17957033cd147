"""Side threads: what an engine computes beside its loop. Whenever one has computed something, the loop is
woken: rows may wait for it, and an idle loop waits for grants.
"""

import contextlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")


class SideThreads:
    """The side threads of one engine; no other thread of an engine may compute what a row waits for.

    Attributes:
        wake: ends the wait of the engine's loop, which sets it.
    """

    def __init__(self) -> None:
        self.wake: Callable[[], None] = lambda: None


class SideThread(ThreadPoolExecutor):
    """A thread that calls functions one after another, and wakes the engine's loop after each. It starts with
    the first one, and gives way to others by its `niceness`. `stack_bytes`: 0 for the system's own size.
    """

    def __init__(self, threads: SideThreads, name: str, niceness: int = 0, stack_bytes: int = 0) -> None:
        super().__init__(1, name, initializer=partial(give_way, niceness) if niceness else None)
        self.threads = threads
        self.stack_bytes = stack_bytes

    def submit(
        self, function: Callable[Parameters, Returned], /, *args: Any, **options: Any
    ) -> Future[Returned]:
        before = threading.stack_size(self.stack_bytes)  # the thread may start now
        future = super().submit(function, *args, **options)
        threading.stack_size(before)
        future.add_done_callback(lambda _: self.threads.wake())
        return future


def give_way(niceness: int) -> None:
    """Lower the priority of this thread, where threads have one of their own (Linux)."""
    with contextlib.suppress(OSError):
        own = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, own, os.getpriority(os.PRIO_PROCESS, own) + niceness)
