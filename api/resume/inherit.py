"""Inherit: go on with an answer of a gateway that has ended, on the same connection."""

import asyncio
import logging
import time
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from api.answers.answer import HttpAnswer, read_answer
from api.errors import ApiError, asking_broker, tgi
from api.event_loop import RETRY_PAUSE_S, attempt
from api.handover.heir import INHERITED
from api.http.middleware import error_response, inherit_trace, trace_of
from api.http.sse import CYCLE
from api.protocols.table import protocol_of
from api.requests.pool import Pool, PoolRegistry
from api.resume import attach
from api.resume.attach import find
from api.streams import http_response
from api.streams.stream import Stream
from common.messages.codec import WireError
from common.messages.kept_answer import KeptAnswer, KeptRequests

log = logging.getLogger(__name__)

Inherited = tuple[Pool, HttpAnswer, list[Stream], int]
"""An answer's pool, the answer, the streams of its choices, and the number of their reader."""


async def write_inherited(pools: PoolRegistry, scope: Scope, receive: Receive, send: Send) -> None:
    """The ASGI application that writes inherited answers. An answer that cannot go on is cut; if none of it
    was written, its client gets the error.
    """
    kept: KeptAnswer = scope["state"][INHERITED]
    try:
        response = await respond(pools, Request(scope, receive), kept)
        await response(scope, receive, send)
    except ClientDisconnect:
        return
    except ApiError as error:
        log.warning("request %s cannot go on: %s", kept.request_id, error)
        if kept.head:
            scope["extensions"][CYCLE].transport.abort()
            return
        await error_response(error, tgi)(scope, receive, send)
    finally:
        if (trace := trace_of(scope)) is not None:
            trace.finish()


async def respond(pools: PoolRegistry, request: Request, kept: KeptAnswer) -> Response:
    """The rest of a stream, or a whole answer. Raises ApiError, ClientDisconnect."""
    pool, answer, streams, reader = await attempt(
        lambda: attach_inherited(pools, kept),
        partial(wait_for_broker, request.scope["extensions"][CYCLE], kept),
    )
    release, protocol = pool.admission.release, protocol_of(answer.route)
    inherit_trace(request.scope, answer, protocol.span)
    return await http_response.respond(
        request,
        answer,
        renderer=protocol.renderer,
        streams=streams,
        headers=dict(kept.extra),
        arrived_s=time.monotonic() - attach.age_s(pool, answer),
        release=release,
        reader=reader,
        num_seen=kept.num_seen,
    )


async def attach_inherited(pools: PoolRegistry, kept: KeptAnswer) -> Inherited:
    """Become the reader of an answer. Requests that the broker has lost are queued again: they give the same
    tokens, and the client gets none twice.

    Raises ApiError: 404, 410, 503.
    """
    try:
        found = await find(pools, kept.request_id)
        if found is None:
            raise attach.unknown_answer(kept.request_id)
        streams = attach.new_streams(*found)
        reader = await attach.become_reader(found.pool, streams, kept.connection)
        return found.pool, found.answer, streams, reader
    except ApiError as error:
        if error.status != 404 or kept.requests is None:
            raise
    pool, answer, streams = await offer_again(pools, kept, kept.requests)
    return pool, answer, streams, await attach.become_reader(pool, streams, kept.connection)


async def offer_again(
    pools: PoolRegistry, kept: KeptAnswer, lost: KeptRequests
) -> tuple[Pool, HttpAnswer, list[Stream]]:
    """Offer the requests of an answer to a broker that has lost some of them. Raises ApiError: 404 if their
    time is over, 503.
    """
    pool = await pools.named(lost.pool)
    try:
        answer = read_answer(lost.answer)
    except WireError as error:  # of another version
        raise attach.unknown_answer(kept.request_id) from error
    streams = attach.new_streams(pool, answer, lost.channel)
    age_ms = round(1000 * attach.age_s(pool, answer))
    for stream, digest in zip(streams, lost.digests, strict=True):
        ttl_ms = stream.request.ttl_ms - age_ms
        if ttl_ms <= 0:
            raise attach.unknown_answer(kept.request_id)
        stream.request = replace(stream.request, digest=digest, ttl_ms=ttl_ms)
        stream.reader = stream.connection = kept.connection
        async with asking_broker():
            await pool.relay.filler.offers.send(stream, ttl_ms, reopen=False)
    log.warning("request %s is offered again: the broker has lost it", kept.request_id)
    return pool, answer, streams


async def wait_for_broker(cycle: Any, kept: KeptAnswer, error: Exception) -> None:
    """Retry policy: while the broker does not answer, try again, until the client has gone; without end if
    the answer is kept without a client.
    """
    if isinstance(error, ApiError) and error.error_type != "unavailable":
        raise error
    await asyncio.sleep(RETRY_PAUSE_S)
    if cycle.disconnected and not (kept.requests and kept.requests.is_kept):
        raise ClientDisconnect
