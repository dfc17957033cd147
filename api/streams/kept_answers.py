"""Kept answers: those that stay in Redis after they were read. Responses of /v1/responses are stored, and
answers to requests with an `Idempotency-Key` are there for repetitions. One bound counts for both.
"""

from collections.abc import Iterable

from api.errors import asking_broker
from api.requests import request_scripts
from common.broker.pool_client import PoolClient
from common.settings.settings import Settings


async def make_room(
    client: PoolClient, settings: Settings, request_ids: Iterable[str], kept_s: float
) -> None:
    """Count requests whose answer will be kept for `kept_s` after its end, and delete the oldest ones beyond
    MAX_STORED_RESPONSES. One that has not ended stays until it expires. Raises ApiError (503).
    """
    ttl_s, max_kept = round(kept_s + settings.request_timeout_s), settings.max_stored_responses
    async with asking_broker():
        for request_id in request_ids:
            note = request_scripts.keep_response(client.keys, request_id, ttl_s=ttl_s, max_kept=max_kept)
            for other in await client.run(note):
                await delete_ended(client, other)


async def delete_ended(client: PoolClient, request_id: str) -> bool:
    """Delete a kept request that has ended. Returns False if it has not."""
    return await client.run(request_scripts.delete_response(client.keys, request_id))
