"""Cancel: tells the fleet that nobody waits for a request any more."""

from common.broker.pool_client import PoolClient
from common.messages.codec import encode
from common.messages.request import Cancel


async def cancel_request(pool: PoolClient, request_id: str, reader: int | None = None) -> bool:
    """Cancel a request, if given only for this reader. Returns False if it has ended, is not known or has
    another reader.
    """
    args: list[bytes | int] = [encode(Cancel(request_id, "client"))]
    args += [] if reader is None else [reader]
    return bool(await pool.run("cancel", [pool.keys.request(request_id), pool.keys.control], args))
