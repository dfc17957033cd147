"""Work that would keep every stream of a gateway waiting is done in a thread."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")

LONG = 4000
"""Characters to tokenise, bytes of JSON, or tokens to describe, that take about a millisecond."""


async def offload(size: int, work: Callable[[], Result]) -> Result:
    """What `work` gives or raises; in a thread where `size`, in what LONG counts, says that it takes long."""
    return work() if size < LONG else await asyncio.to_thread(work)
