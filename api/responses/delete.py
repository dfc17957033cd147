"""The ends that a client sets to stored responses: cancel and delete."""

import asyncio
import time

from api.errors import asking_broker, unavailable
from api.inference.pool import Pool
from api.responses.stored import StoredResponse, read_response
from api.streams.stream import Stream
from common.broker import request_scripts
from common.broker.cancel import cancel_request

END_S, PAUSE_S = 10.0, 0.05
"""How long and how often a cancelled request is asked for its end."""


async def cancel_stored(stored: StoredResponse) -> Stream:
    """Cancel the request unless it has ended. Returns its stream, ended, or after END_S as it is then. Raises
    ApiError (503).
    """
    stream = await read_response(stored)
    if stream.terminal:
        return stream
    async with asking_broker():
        await cancel_request(stored.pool.client, stored.answer.request_id)
    end_s = time.monotonic() + END_S
    while True:
        stream = await read_response(stored)
        if stream.terminal or time.monotonic() > end_s:
            return stream
        await asyncio.sleep(PAUSE_S)


async def delete_response(stored: StoredResponse) -> None:
    """Delete a response that has ended, or that ends by being cancelled. Raises ApiError (503)."""
    await cancel_stored(stored)
    async with asking_broker():
        if not await delete_ended(stored.pool, stored.answer.request_id):
            raise unavailable("the response was cancelled, but has not ended yet: delete it again")


async def delete_ended(pool: Pool, request_id: str) -> bool:
    """Delete a response. Returns False if it has not ended yet."""
    return await pool.client.run(request_scripts.delete_response(pool.client.keys, request_id))


async def make_room(pool: Pool, request_id: str) -> None:
    """Count a response that will be stored; the oldest of too many are deleted. One that has not ended stays
    until it expires. Raises ApiError (503).
    """
    settings = pool.settings
    most_s = round(settings.response_ttl_s + settings.request_timeout_s)
    async with asking_broker():
        oldest = await pool.client.run(
            request_scripts.keep_response(
                pool.client.keys, request_id, ttl_s=most_s, max_kept=settings.max_stored_responses
            )
        )
        for other in oldest:
            await delete_ended(pool, other)
