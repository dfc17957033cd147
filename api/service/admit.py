"""Admit: the error of a request that the script `admit` refuses."""

import math

from api.errors import ApiError, conflict, overloaded
from common.broker.request_scripts import AdmitReply

MAX_WAIT_S = 60


def refusal(reply: AdmitReply, tenant: str) -> ApiError:
    """The error of a request that was not admitted: 409 if another has its id, else 429 with the time until
    there may be room.
    """
    if reply.outcome == "conflict":
        return conflict("request")
    wait_s = min(MAX_WAIT_S, max(1, math.ceil(reply.wait_ms / 1000)))
    why = f": tenant {tenant!r} has its share of the queue" if reply.outcome == "tenant" else ""
    return overloaded(why, wait_s)
