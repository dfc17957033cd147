"""Heir: continues answers of gateways that have ended, each at the byte that its client waits for."""

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn import Config
from uvicorn.server import ServerState

from api.answers.answer import HttpAnswer
from api.errors import ApiError, asking_broker, tgi
from api.event_loop import RETRY_PAUSE_S, attempt
from api.handover.answer_socket import FORMAT, INHERITED, INTERIM, KeeperChannel, RestOfAnswer, socket_of
from api.http.middleware import error_response, inherit_trace
from api.http.protocol import HttpProtocol
from api.http.sse import as_chunk, bytes_written
from api.protocols.table import protocol_of
from api.requests.registry import PoolRegistry
from api.resume import attach
from api.resume.attach import Admitted, find
from api.streams import http_response
from api.streams.http_response import Reader
from common.messages.codec import WireError, decode
from common.messages.kept_answer import KeeperMessage, KeptAnswer, KeptRequests

log = logging.getLogger(__name__)


class InheritedConnection(HttpProtocol):
    """A connection whose request another gateway has read: a request like it is read once more. It is closed
    after the answer. What its client sends meanwhile is ignored: of a pipelined request that gateway may have
    read the first part.
    """

    def __init__(
        self,
        config: Config,
        state: ServerState,
        app_state: dict[str, Any],
        answer: KeptAnswer,
        num_written: int,
    ) -> None:
        super().__init__(config, state, {**app_state, "request_id": answer.request_id, INHERITED: answer})
        self.answer = answer
        self.num_written = num_written

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        answer = self.answer
        comment = as_chunk(answer.comment, answer.http_version)
        rest: Any = RestOfAnswer(transport, self.num_written, comment, answer.comments)
        super().connection_made(rest)
        fields = [(b"host", b"-"), (b"connection", b"close"), *answer.headers]
        lines = [b"POST /inherited HTTP/%b" % answer.http_version.encode()]
        super().data_received(b"\r\n".join([*lines, *map(b": ".join, fields), b"", b""]))

    def enter(self) -> None:
        """Count no inherited connection: its client was let in before."""

    def data_received(self, data: bytes) -> None:
        pass


async def go_on(
    answer: KeptAnswer,
    connection: socket.socket,
    new_connection: Callable[[KeptAnswer, int], InheritedConnection],
    channel: KeeperChannel,
) -> None:
    """Continue an answer on its connection, as the application of the gateway's own requests."""
    loop = asyncio.get_running_loop()
    try:
        connection.setblocking(False)
        num_written = bytes_written(connection) - answer.base
        if answer.format != FORMAT or num_written < -len(INTERIM):
            raise OSError(f"format {answer.format}, {num_written} bytes written")
        log.debug("request %s goes on here at byte %d of its answer", answer.request_id, num_written)
        await loop.connect_accepted_socket(lambda: new_connection(answer, num_written), connection)
    except OSError as error:
        log.warning("request %s cannot go on here: %s", answer.request_id, error)
        connection.close()
        await channel.tell(KeeperMessage(drop=answer.name))


# --- the answer ---------------------------------------------------------------------------------------------


async def write_inherited(
    pools: PoolRegistry, app: ASGIApp, scope: Scope, receive: Receive, send: Send
) -> None:
    """Middleware: write an inherited answer from its first byte on. An answer that cannot go on is cut; if
    none of it was written, its client gets the error.
    """
    kept: KeptAnswer | None = scope["state"].get(INHERITED)
    own = socket_of(scope)
    if kept is None:
        await app(scope, receive, send)
        return
    try:
        response = await respond(pools, Request(scope, receive), kept)
        await response(scope, receive, send)
    except ClientDisconnect:
        return
    except ApiError as error:
        log.warning("request %s cannot go on: %s", kept.request_id, error)
        if kept.head:
            await own.cut()
        else:
            await error_response(error, tgi)(scope, receive, send)
    except Exception:
        await own.cut()
        raise


async def respond(pools: PoolRegistry, request: Request, kept: KeptAnswer) -> Response:
    """The rest of a stream, or a whole answer. Raises ApiError, ClientDisconnect."""
    reader = await attempt(
        lambda: attach_inherited(pools, kept),
        partial(wait_for_broker, socket_of(request.scope).cycle, kept),
    )
    protocol = protocol_of(reader.answer.route)
    inherit_trace(request.scope, reader.answer, protocol.span)
    arrived_s = time.monotonic() - attach.age_s(reader.pool, reader.answer)
    return await http_response.respond(request, reader, protocol.renderer, dict(kept.extra), arrived_s)


async def attach_inherited(pools: PoolRegistry, kept: KeptAnswer) -> Reader:
    """Become the reader of an answer. Requests that the broker has lost are queued again: they give the same
    tokens, and the client gets none twice.

    Raises ApiError: 404, 410, 503.
    """
    try:
        found = await find(pools, kept.request_id)
        if found is None:
            raise attach.unknown_answer(kept.request_id)
        reader = Reader(found.pool, found.answer, attach.new_streams(found), num_seen=kept.num_seen)
        reader.number = await attach.become_reader(reader.pool, reader.streams, kept.connection)
    except ApiError as error:
        if error.status != 404 or kept.requests is None:
            raise
        reader = await offer_again(pools, kept, kept.requests)
        reader.number = await attach.become_reader(reader.pool, reader.streams, kept.connection)
    return reader


async def offer_again(pools: PoolRegistry, kept: KeptAnswer, lost: KeptRequests) -> Reader:
    """Offer the requests of an answer to a broker that has lost some of them. Raises ApiError: 404 if their
    time is over, 503.
    """
    pool = await pools.named(lost.pool)
    try:
        answer = decode(HttpAnswer, lost.answer)
    except WireError as error:  # of another version
        raise attach.unknown_answer(kept.request_id) from error
    streams = attach.new_streams(Admitted(pool, answer, lost.channel))
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
    return Reader(pool, answer, streams, num_seen=kept.num_seen)


async def wait_for_broker(cycle: Any, kept: KeptAnswer, error: Exception) -> None:
    """Retry policy: while the broker does not answer, try again, until the client has gone; without end if
    the answer is kept without a client.
    """
    if isinstance(error, ApiError) and error.error_type != "unavailable":
        raise error
    await asyncio.sleep(RETRY_PAUSE_S)
    if cycle.disconnected and not (kept.requests and kept.requests.is_kept):
        raise ClientDisconnect
