"""Heir: continues answers of gateways that have ended, each at the byte that its client waits for."""

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Any

import h11
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.server import ServerState

from api.handover.answer_socket import ANSWER_SOCKET, FORMAT, INTERIM, AnswerSocket
from api.handover.keeper_channel import KeeperChannel
from api.handover.rest_of_answer import RestOfAnswer
from api.http.sse import CYCLE, as_chunk, bytes_written
from common.messages.kept_answer import KeeperMessage, KeptAnswer

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
