"""Answer: describes an answer when its request is accepted, and says in its requests who reads it and how
long it is kept.
"""

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib.metadata import version

from api.answers.answer import HttpAnswer, Rendering, ResumeTerms
from api.errors import asking_broker
from api.requests import request_scripts
from common.broker.keys import RESULT_TTL_MS, Keys
from common.broker.pool_client import PoolClient
from common.messages.codec import encode
from common.messages.request import Generate, prompt_hashes
from common.settings.settings import Settings

MAX_STORED = 10_000
"""Stored responses of a pool, and answers kept for an Idempotency-Key; each choice is one."""
GATEWAY_GRACE_S = 30.0
"""How long a request lives on after its gateway died."""

REQUEST_KEY_MARGIN_MS = 60_000
FINGERPRINT = f"tokenfleet-{version('tokenfleet')}"


def describe_answer(
    *,
    request_id: str,
    route: str,
    streamed: bool,
    model: str,
    requests: Sequence[Generate],
    prefixes: Sequence[str],
    rendering: Rendering,
    terms: ResumeTerms,
    created_s: int,
) -> HttpAnswer:
    """The answer to validated requests: those of the choices of the first prompt, then those of the next. A
    beam search is one request for all choices of its prompt.

    Args:
        prefixes: for each prompt, the text with which its choices begin.
        created_s: Unix time, by the broker's clock.
    """
    per_prompt = len(requests) // len(prefixes)
    beams = requests[0].beams
    return HttpAnswer(
        request_id=request_id,
        route=route,
        streamed=streamed,
        created_s=created_s,
        model=model,
        fingerprint=FINGERPRINT,
        n=beams.num_returned if beams else per_prompt,
        prompts=[request.prompt_ids for request in requests[::per_prompt]],
        requests=[replace(request, prompt_ids=b"") for request in requests],
        prefixes=list(prefixes),
        rendering=rendering,
        terms=terms,
    )


def address(settings: Settings, gateway: str, request: Generate, request_id: str) -> Generate:
    """A validated request with its id, its digest, and the gateway that is its reader."""
    content = replace(
        request,
        result_ttl_ms=round(settings.request_timeout_s * 1000),  # for slow clients of a gateway that has died
        channel=Keys(settings.pool).events(gateway),
        gateway=gateway,
        grace_ms=round(GATEWAY_GRACE_S * 1000),
    )
    digest = hashlib.blake2b(encode(replace(content, account=None, webhook=b"")), digest_size=16).hexdigest()
    logits = request.logits and (request.pooling is None or request.logits.context)
    whole = request.prompt_logprobs is not None or logits or not settings.prefix_caching
    hashes = b"" if whole else prompt_hashes(request)
    return replace(content, request_id=request_id, digest=digest, block_hashes=hashes)


def keep_as_asked(request: Generate, answer: HttpAnswer) -> Generate:
    """A choice's request with the answer's terms: how long it goes on without its client, and how long its
    result is kept.
    """
    terms = answer.terms
    kept_ms = [request.result_ttl_ms, terms.resume_ms or 0, round(1000 * terms.kept_s)]
    if len(answer.requests) > 1:  # the first choice that ends must outlive the last one
        kept_ms.append(request.ttl_ms + REQUEST_KEY_MARGIN_MS)
    if terms.detached:
        kept_ms.append(RESULT_TTL_MS)
    kept = replace(request, result_ttl_ms=max(kept_ms))
    if terms.goes_on_s == math.inf:
        return replace(kept, gateway="", grace_ms=0)
    return kept if terms.resume_ms is None else replace(kept, grace_ms=terms.resume_ms)


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
