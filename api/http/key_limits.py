"""Key limits: what a request takes of the rates of its API key, and what its client is told of them, as by
OpenAI's API: in headers of the answer, and in the error of a request beyond a limit.
"""

import math
from collections.abc import Mapping

from api.errors import ApiError, invalid
from api.requests.request_scripts import AdmitReply, KeyCharge, LeftOfRates
from common.api_keys import ApiKey
from common.messages.request import Generate

LIMITS = {
    "key_live": ("max_concurrent", "live requests"),
    "key_requests": ("requests_per_minute", "requests a minute"),
    "key_tokens": ("tokens_per_minute", "tokens a minute"),
}
"""Outcomes of an admission → the limit of the key, and its name."""


def charge_for(key: ApiKey, request: Generate, place: int, per_prompt: int) -> KeyCharge:
    """What a request takes. A client's request counts once, and each of its prompts once.

    Args:
        place: of the request among those of its answer.
        per_prompt: requests for each prompt.
    """
    num_sequences = request.beams.num_returned if request.beams else 1
    return KeyCharge(
        key,
        num_requests=int(place == 0),
        num_asked=0 if place % per_prompt else request.num_prompt,
        num_answer=0 if request.pooling else request.stopping.max_new_tokens * num_sequences,
    )


def check_number(key: ApiKey, num_requests: int) -> None:
    """Raises ApiError (422) if a client's request, with a choice of each prompt as a request of its own, is
    beyond its key's limit for itself.
    """
    if 0 < key.max_concurrent < num_requests:
        text = (
            f"This request has {num_requests} choices of its prompts. The API key {key.key_id} may have "
            f"{key.max_concurrent} live requests, and each choice is one"
        )
        raise invalid(text, "max_concurrent")


def limit_headers(key: ApiKey, left: LeftOfRates | None) -> dict[str, str]:
    """OpenAI's headers, for the rates that the key has."""
    if left is None:
        return {}
    rates = (
        ("requests", key.requests_per_minute, left.requests),
        ("tokens", key.tokens_per_minute, left.tokens),
    )
    headers: dict[str, str] = {}
    for what, limit, rest in rates:
        if limit:
            headers |= {
                f"x-ratelimit-limit-{what}": str(limit),
                f"x-ratelimit-remaining-{what}": str(max(0, math.floor(rest))),
                f"x-ratelimit-reset-{what}": render_duration(60 * max(0.0, limit - rest) / limit),
            }
    return headers


def render_duration(seconds: float) -> str:
    """A duration as OpenAI writes it: `120ms`, `1s`, `6m0s`."""
    if seconds < 1:
        return f"{round(1000 * seconds)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return (f"{hours}h" if hours else "") + (f"{minutes}m" if hours or minutes else "") + f"{rest}s"


def beyond_limit(key: ApiKey, reply: AdmitReply, headers: Mapping[str, str]) -> ApiError:
    """The error of a request beyond a limit of its key (429)."""
    field, words = LIMITS[reply.outcome]
    wait_s = max(1, math.ceil(reply.wait_ms / 1000))
    text = (
        f"Rate limit reached for the API key {key.key_id}: {getattr(key, field)} {words}. "
        f"Used: {reply.num_counted}. Try again in {wait_s}s"
    )
    return ApiError(429, "rate_limit", text, field, retry_after_s=wait_s, headers=headers)
