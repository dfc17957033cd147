"""The wait for whole answers, which ends as well when the client goes."""

import asyncio
from collections.abc import Callable, Sequence

from starlette.requests import ClientDisconnect, Request

from api.errors import failed
from api.inference.stream import Stream


async def finished(streams: Sequence[Stream], request: Request, release: Callable[[Stream], None]) -> None:
    """Returns when all streams have finished; `leave` is called for each, however it goes.

    Raises:
        ApiError: of the first stream that did not end well.
        ClientDisconnect: nobody waits any more.
    """
    tasks = {asyncio.create_task(all_ended(streams)), asyncio.create_task(abandoned(request))}
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        for stream in streams:
            release(stream)
    for stream in streams:
        if stream.terminal is None:
            raise ClientDisconnect
        if not stream.finished:
            raise failed(stream.terminal)


async def all_ended(streams: Sequence[Stream]) -> None:
    for stream in streams:
        await stream.ended.wait()


async def abandoned(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
