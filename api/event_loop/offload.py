"""Offload: runs long work in a thread, because on the event loop it would delay every stream of the
gateway.
"""

import asyncio
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")

LONG = 4000
"""Size of work that takes about a millisecond: characters to tokenise, bytes of JSON, or tokens to render."""


async def offload(size: int, work: Callable[[], Result]) -> Result:
    """The result of `work`, or its exception; it runs in a thread if `size`, in the units of LONG, is
    large.
    """
    return work() if size < LONG else await asyncio.to_thread(work)
