"""First end: coroutines that run until one of them ends."""

import asyncio
from collections.abc import Coroutine
from typing import Any


async def run_until_one_ends(*coroutines: Coroutine[Any, Any, object]) -> None:
    """Return when the first one has returned, or raise what it raised; the others are cancelled."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
