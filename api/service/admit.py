"""Admit: what the script `admit` is told of a request; and the error when it refuses."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from api.errors import ApiError, conflict, overloaded
from common.messages.codec import encode
from common.messages.request import Generate
from common.settings.settings import Settings

MAX_WAIT_S = 60


def admit_args(
    request: Generate, answer: bytes, settings: Settings, weights: Mapping[str, float]
) -> list[bytes | str | int | float]:
    """The arguments with which it puts a request on the queue where its class and its tenant have room."""
    return [
        encode(request),
        settings.max_concurrent_requests,
        settings.max_queued_bytes,
        request.digest,
        request.channel,
        request.gateway,
        request.width,
        answer,
        request.service_class,
        request.tenant,
        weights.get(request.tenant, 1.0),
        request.num_prompt,
        settings.max_queued_tokens or "",
    ]


def refusal(outcome: Sequence[Any], tenant: str) -> ApiError:
    """The error of a request that was not admitted: 409 if another has its id, else 429 with the time until
    there may be room.
    """
    if outcome[0] == b"conflict":
        return conflict("request")
    wait_s = min(MAX_WAIT_S, max(1, math.ceil(outcome[2] / 1000)))
    why = f": tenant {tenant!r} has its share of the queue" if outcome[0] == b"tenant" else ""
    return overloaded(why, wait_s)
