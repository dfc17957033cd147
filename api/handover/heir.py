"""Heir: continues answers of gateways that have ended, each at the byte that its client waits for."""

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import h11
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.server import ServerState

from api.answers.answer import HttpAnswer
from api.errors import ApiError, asking_broker, tgi
from api.event_loop import RETRY_PAUSE_S, attempt
from api.handover.answer_socket import (
    ANSWER_SOCKET,
    FORMAT,
    INTERIM,
    AnswerSocket,
    KeeperChannel,
    RestOfAnswer,
)
from api.http.middleware import error_response, inherit_trace, trace_of
from api.http.sse import CYCLE, as_chunk, bytes_written
from api.protocols.table import protocol_of
from api.requests.pool import Pool
from api.requests.registry import PoolRegistry
from api.resume import attach
from api.resume.attach import find
from api.streams import http_response
from api.streams.stream import Stream
from common.messages.codec import WireError, decode
from common.messages.kept_answer import KeeperMessage, KeptAnswer, KeptRequests

log = logging.getLogger(__name__)

INHERITED = "inherited"
"""Key of a request's state: the KeptAnswer that was inherited."""


class Heir:
    """Serves inherited answers beside a server's own requests.

    Args:
        new_connection: makes a connection of the server that reads nothing.
        app: writes a whole answer from its first byte on; `scope["state"][INHERITED]` says which.
    """

    def __init__(
        self,
        new_connection: Callable[[], H11Protocol],
        state: ServerState,
        app: ASGIApp,
        channel: KeeperChannel,
    ) -> None:
        self.new_connection = new_connection
        self.state = state
        self.app = app
        self.channel = channel

    def inherit(self, answer: KeptAnswer, connection: socket.socket) -> None:
        """Continue an answer in a task of the server, which waits for it before it ends."""
        task = asyncio.create_task(self.go_on(answer, connection))
        self.state.tasks.add(task)
        task.add_done_callback(self.state.tasks.discard)

    async def go_on(self, answer: KeptAnswer, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            connection.setblocking(False)
            num_written = bytes_written(connection) - answer.base
            if answer.format != FORMAT or num_written < -len(INTERIM):
                raise OSError(f"format {answer.format}, {num_written} bytes written")
            protocol = self.new_connection()
            transport, _ = await loop.connect_accepted_socket(lambda: protocol, connection)
        except OSError as error:
            log.warning("request %s cannot go on here: %s", answer.request_id, error)
            connection.close()
            self.channel.post(KeeperMessage(drop=answer.name))
            return
        log.debug("request %s goes on here at byte %d of its answer", answer.request_id, num_written)
        comment = as_chunk(answer.comment, answer.http_version)
        rest = RestOfAnswer(transport, num_written, comment, answer.comments)
        cycle = self.new_cycle(answer, protocol, rest)
        try:
            await self.app(cycle.scope, cycle.receive, cycle.send)
        except Exception:
            log.exception("request %s", answer.request_id)
            transport.abort()

    def new_cycle(self, answer: KeptAnswer, protocol: H11Protocol, rest: RestOfAnswer) -> Any:
        """uvicorn's object for a request whose body has arrived, and which is answered on this connection."""
        read_request(protocol.conn, answer.http_version)
        state = protocol.app_state | {"request_id": answer.request_id, INHERITED: answer}
        scope: Any = {
            "type": "http",
            "asgi": {"version": protocol.asgi_version, "spec_version": "2.3"},
            "http_version": answer.http_version,
            "server": protocol.server,
            "client": protocol.client,
            "scheme": protocol.scheme,
            "method": "POST",
            "root_path": protocol.root_path,
            "path": "/",
            "raw_path": b"/",
            "query_string": b"",
            "headers": answer.headers,
            "state": state,
        }
        cycle = RequestResponseCycle(
            scope=scope,
            conn=protocol.conn,
            transport=rest,  # type: ignore[arg-type]
            flow=protocol.flow,
            logger=protocol.logger,
            access_logger=protocol.access_logger,
            access_log=False,
            default_headers=self.state.default_headers,
            message_event=asyncio.Event(),
            on_response=protocol.on_response_complete,
        )
        cycle.more_body = False
        cycle.message_event.set()  # its body has arrived
        protocol.cycle = cycle
        scope["extensions"] = {CYCLE: cycle}
        state[ANSWER_SOCKET] = AnswerSocket(self.channel, cycle, answer)
        return cycle


def read_request(connection: h11.Connection, http_version: str) -> None:
    """Let h11 read a request like the one that the first gateway has read, and no request after it."""
    connection.receive_data(f"POST / HTTP/{http_version}\r\nhost: -\r\nconnection: close\r\n\r\n".encode())
    while not isinstance(connection.next_event(), h11.EndOfMessage):
        pass


# --- the answer ---------------------------------------------------------------------------------------------


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
    release, protocol = pool.release, protocol_of(answer.route)
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
        answer = decode(HttpAnswer, lost.answer)
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
