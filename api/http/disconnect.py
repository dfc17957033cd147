"""Disconnect: waits for whole answers, or for their client to leave."""

import asyncio
from collections.abc import Callable, Sequence

from starlette.requests import ClientDisconnect, Request

from api.errors import failed
from api.inference.stream import Stream


async def wait_until_finished(
    streams: Sequence[Stream], request: Request, release: Callable[[Stream], None]
) -> None:
    """Wait until all streams have finished; `release` is called for each in any case.

    Raises:
        ApiError: the error of the first stream that failed.
        ClientDisconnect: the client has left.
    """
    tasks = {asyncio.create_task(all_ended(streams)), asyncio.create_task(wait_for_disconnect(request))}
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


async def wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
