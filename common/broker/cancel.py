"""Cancel: tells the fleet that nobody waits for a request any more."""

from common.broker import request_scripts
from common.broker.pool_client import PoolClient


async def cancel_request(pool: PoolClient, request_id: str, reader: int | None = None) -> bool:
    """Cancel a request, if given only for this reader. Returns False if it has ended, is not known or has
    another reader.
    """
    return await pool.run(request_scripts.cancel(pool.keys, request_id, reader=reader))
