"""AdmitCall: the script `admit` with its arguments; and the error when it refuses."""

import math
from collections.abc import Sequence
from typing import Any

from redis.asyncio import Redis

from api.errors import ApiError, conflict, overloaded
from common.broker.client import script
from common.broker.keys import Keys, admission_keys
from common.messages.codec import encode
from common.messages.request import Generate
from common.settings.settings import Settings

MAX_WAIT_S = 60


class AdmitCall:
    """Calls `admit`, which puts a request on the queue where its class and its tenant have room."""

    def __init__(self, redis: Redis, keys: Keys, settings: Settings) -> None:
        self.keys = keys
        self.settings = settings
        self.weights = settings.weights
        self.script = script(redis, "admit")

    async def __call__(self, request: Generate, answer: bytes) -> list[Any]:
        """The script's answer."""
        settings = self.settings
        args: list[bytes | str | int | float] = [
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
            self.weights.get(request.tenant, 1.0),
            request.num_prompt,
            settings.max_queued_tokens or "",
        ]
        keys = admission_keys(self.keys, request.request_id, request.service_class)
        outcome: list[Any] = await self.script(keys=keys, args=args)
        return outcome


def refusal(outcome: Sequence[Any], tenant: str) -> ApiError:
    """The error of a request that was not admitted: 409 if another has its id, else 429 with the time until
    there may be room.
    """
    if outcome[0] == b"conflict":
        return conflict("request")
    wait_s = min(MAX_WAIT_S, max(1, math.ceil(outcome[2] / 1000)))
    why = f": tenant {tenant!r} has its share of the queue" if outcome[0] == b"tenant" else ""
    return overloaded(why, wait_s)
