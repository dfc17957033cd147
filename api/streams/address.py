"""Address: says in the requests of an answer who reads it and how long it lives. Answers that are kept."""

import hashlib
import math
from collections.abc import Iterable
from dataclasses import replace

from api.answers.answer import HttpAnswer
from api.errors import asking_broker
from api.requests import request_scripts
from common.broker.keys import Keys
from common.broker.pool_client import PoolClient
from common.messages.codec import encode
from common.messages.request import Generate, prompt_hashes
from common.settings.settings import Settings

MAX_STORED = 10_000
"""Stored responses of a pool, and answers kept for an Idempotency-Key; each choice is one."""
GATEWAY_GRACE_S = 30.0
"""How long a request lives on after its gateway died."""

REQUEST_KEY_MARGIN_S = 60.0


def address(
    settings: Settings, gateway: str, request: Generate, request_id: str, answer: HttpAnswer
) -> Generate:
    """A choice's request with its id, its digest, the gateway that is its reader, and how long its answer
    lives. One that goes on up to its deadline belongs to no gateway.
    """
    terms = answer.terms
    kept_s = max(settings.request_timeout_s, terms.kept_s)  # for slow clients of a gateway that has died
    if len(answer.requests) > 1:  # the first choice that ends must outlive the last one
        kept_s = max(kept_s, request.ttl_ms / 1000 + REQUEST_KEY_MARGIN_S)
    is_free = terms.goes_on_s == math.inf
    goes_on_s = GATEWAY_GRACE_S if terms.goes_on_s is None else terms.goes_on_s
    content = replace(
        request,
        channel=Keys(settings.pool).events(gateway),
        gateway="" if is_free else gateway,
        goes_on_ms=0 if is_free else round(1000 * goes_on_s),
        kept_ms=round(1000 * kept_s),
    )
    digest = hashlib.blake2b(encode(replace(content, account=None, webhook=b"")), digest_size=16).hexdigest()
    logits = request.logits and (request.pooling is None or request.logits.context)
    whole = request.prompt_logprobs is not None or logits or not settings.prefix_caching
    hashes = b"" if whole else prompt_hashes(request)
    return replace(content, request_id=request_id, digest=digest, block_hashes=hashes)


# --- kept answers -------------------------------------------------------------------------------------------


async def make_room(
    client: PoolClient, settings: Settings, request_ids: Iterable[str], kept_s: float
) -> None:
    """Count requests whose answer will be kept for `kept_s` after its end, and delete the oldest ones beyond
    MAX_STORED. One that has not ended stays until it expires. Raises ApiError (503).
    """
    ttl_s, max_kept = round(kept_s + settings.request_timeout_s), MAX_STORED
    async with asking_broker():
        for request_id in request_ids:
            note = request_scripts.keep_response(client.keys, request_id, ttl_s=ttl_s, max_kept=max_kept)
            for other in await client.run(note):
                await delete_ended(client, other)


async def delete_ended(client: PoolClient, request_id: str) -> bool:
    """Delete a kept request that has ended. Returns False if it has not."""
    return await client.run(request_scripts.delete_response(client.keys, request_id))
