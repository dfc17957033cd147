"""Cancel: tells the fleet that nobody waits for a request any more."""

import redis.asyncio

from common.broker.client import script
from common.broker.keys import Keys
from common.messages.codec import encode
from common.messages.request import Cancel


async def cancel_request(
    client: redis.asyncio.Redis, keys: Keys, request_id: str, reader: int | None = None
) -> bool:
    """Cancel a request, if given only for this reader. Returns False if it has ended, is not known or has
    another reader.
    """
    args: list[bytes | int] = [encode(Cancel(request_id, "client"))]
    args += [] if reader is None else [reader]
    return bool(await script(client, "cancel")(keys=[keys.request(request_id), keys.control], args=args))
