"""Admitted: the answer of a request that a pool has admitted, found by the request's id."""

import contextlib
import hmac
import re
from typing import NamedTuple

from starlette.requests import Request

from api.errors import asking_broker
from api.http.resume_terms import owner_of
from api.inference.pool import Pool
from api.inference.pool_registry import PoolRegistry, pools_of
from common.broker.keys import POOLS, Keys
from common.messages.answer import HttpAnswer
from common.messages.codec import WireError, decode

REQUEST_ID = re.compile(r"[0-9a-f]{32}")


class Admitted(NamedTuple):
    """An answer that was admitted, and may have ended.

    Attributes:
        channel: of its events.
    """

    pool: Pool
    answer: HttpAnswer
    channel: str


async def find_own(request: Request, request_id: str) -> Admitted | None:
    """The answer with this id, if asked for with the API key of this request. Raises ApiError (503)."""
    if not REQUEST_ID.fullmatch(request_id):
        return None
    return await find(pools_of(request), request_id, owner_of(request, request_id))


async def find(pools: PoolRegistry, request_id: str, owner: str | None = None) -> Admitted | None:
    """The answer with this id, of this owner if one is named. Raises as `find_own`."""
    async with asking_broker():
        found = await look_up(pools.own, request_id)
    if found is None:
        return None
    name, answer, channel = found
    if owner is not None and not hmac.compare_digest(answer.terms.owner, owner):
        return None
    return Admitted(await pools.named(name), answer, channel)


async def look_up(own: Pool, request_id: str) -> tuple[str, HttpAnswer, str] | None:
    """The name of the pool, the answer and its channel. The gateway's own pool has nearly all answers."""
    others = [member.decode() for member in await own.client.redis.zrange(POOLS, 0, -1)]
    for name in (own.settings.pool, *others):
        for first_choice in (request_id, f"{request_id}.0"):
            request_key = Keys(name).request(first_choice)
            kept, channel = await own.client.redis.hmget(request_key, ["answer", "channel"])  # type: ignore[misc]
            if kept is not None and channel is not None:
                with contextlib.suppress(WireError):  # somebody wrote to the key
                    return name, decode(HttpAnswer, kept), channel.decode()
    return None
