"""What a gateway counts: requests that arrive, are refused, hear tokens, end."""

import logging
import time
from contextvars import ContextVar
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Receive, Scope, Send

from common.metrics import catalogue
from common.metrics.catalogue import service_class
from common.process.logs import for_request

if TYPE_CHECKING:
    from api.inference.stream import Stream
    from api.inference.validate import Limits

log = logging.getLogger(__name__)

ROUTES = ("/", "/generate", "/generate_stream", "/v1/chat/completions", "/v1/completions")
FAILURES = {"overloaded": "overloaded", "unavailable": "unavailable", "template_error": "template"}
"""Type of a refusal → label `err`; all others are `validation`."""
ARRIVED_S: ContextVar[float] = ContextVar("arrived_s", default=0.0)
"""Monotonic time at which the request that this task serves arrived; 0 for tasks that serve none."""


class MetricsMiddleware:
    """Around an application: notes when a request for tokens arrives."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in ROUTES:
            arrive()
        await self.app(scope, receive, send)


def arrive() -> None:
    """A request arrives, by whatever door; what this task does from here on is done for it."""
    ARRIVED_S.set(time.monotonic())
    catalogue.REQUEST_COUNT.add()


def refused(status: int, error_type: str) -> None:
    """An error is answered. What failed after its admission (424) is counted when its stream is left."""
    if ARRIVED_S.get() and status != 424:
        catalogue.REQUEST_FAILURE.add(1, FAILURES.get(error_type, "validation"))


def left(stream: "Stream", limits: "Limits") -> None:
    """Nobody reads the stream any more."""
    if not stream.admitted:
        return
    fit(limits)
    catalogue.INPUT_LENGTH.observe(len(stream.prompt_ids))
    catalogue.MAX_NEW_TOKENS.observe(stream.request.stopping.max_new_tokens)
    reason = stream.terminal.reason if stream.terminal else "cancelled"
    request_id, so_far_s = stream.request.request_id, time.monotonic() - stream.begun_s
    log.info(
        "request %s: %s after %d tokens and %.3f s",
        request_id,
        reason,
        stream.num_tokens,
        so_far_s,
        extra=for_request(request_id),
    )
    catalogue.REQUESTS.add(1, service_class(stream.request.priority), reason)
    if stream.finished:
        succeeded(stream)
    else:
        catalogue.REQUEST_FAILURE.add(1, "dropped" if reason == "cancelled" else "generation")


def fit(limits: "Limits") -> None:
    """The buckets of lengths reach up to what is possible."""
    catalogue.INPUT_LENGTH.fit(limits.max_input_tokens)
    catalogue.MAX_NEW_TOKENS.fit(limits.max_total_tokens)
    catalogue.GENERATED_TOKENS.fit(limits.max_total_tokens)


def succeeded(stream: "Stream") -> None:
    arrived_s = ARRIVED_S.get() or stream.begun_s
    inference_s = stream.ended_s - stream.placed_s
    catalogue.REQUEST_SUCCESS.add()
    catalogue.REQUEST_DURATION.observe(stream.ended_s - arrived_s)
    catalogue.VALIDATION_DURATION.observe(stream.begun_s - arrived_s)
    catalogue.QUEUE_DURATION.observe(stream.placed_s - stream.begun_s)
    catalogue.INFERENCE_DURATION.observe(inference_s)
    catalogue.TIME_PER_TOKEN.observe(inference_s / max(1, stream.num_tokens))
    catalogue.GENERATED_TOKENS.observe(stream.num_tokens)
