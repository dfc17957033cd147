"""Disconnect: waits for whole answers, or for their client to leave."""

import asyncio
from collections.abc import Sequence

from starlette.requests import ClientDisconnect, Request

from api.errors import failed
from api.streams.stream import Stream
from common.process.first_end import run_until_one_ends


async def wait_until_finished(streams: Sequence[Stream], request: Request) -> None:
    """Wait until all streams have finished, or one has failed.

    Raises:
        ApiError: the error of the first stream that failed.
        ClientDisconnect: the client has left.
    """
    await run_until_one_ends(all_finished(streams), wait_for_disconnect(request))
    for stream in streams:
        if stream.terminal and not stream.finished:
            raise failed(stream.terminal)
    if not all(stream.finished for stream in streams):
        raise ClientDisconnect


async def all_ended(streams: Sequence[Stream]) -> None:
    for stream in streams:
        await stream.ended.wait()


async def all_finished(streams: Sequence[Stream]) -> None:
    """Returns when all have finished, or at the first that has failed."""
    ends = [asyncio.create_task(stream.ended.wait()) for stream in streams]
    try:
        while any(not stream.terminal for stream in streams):
            await asyncio.wait([end for end in ends if not end.done()], return_when=asyncio.FIRST_COMPLETED)
            if any(stream.terminal and not stream.finished for stream in streams):
                return
    finally:
        for end in ends:
            end.cancel()


async def wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
