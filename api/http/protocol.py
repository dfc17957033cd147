"""HTTP protocol: uvicorn's, with TGI's error object for requests that it cannot parse and that reach no
route.
"""

import asyncio
import uuid
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from api.errors import ApiError, tgi
from api.heir.answer_socket import CYCLE
from api.http.request_id import HEADER
from api.http.unread import UNREAD, Unread
from api.json import to_json


class HttpProtocol(HttpToolsProtocol):
    """One connection of a client.

    Attributes:
        unread: what its client has not read yet; watched by the gateway (`api/http/unread.py`).
    """

    unread: Unread

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.unread = Unread(transport)
        self.app_state[UNREAD].connections.add(self.unread)

    def connection_lost(self, exc: Exception | None) -> None:
        self.app_state[UNREAD].connections.discard(self.unread)
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"][UNREAD] = self.unread

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        extensions: dict[str, Any] = {CYCLE: self.cycle}
        self.scope["extensions"] = extensions

    def send_400_response(self, msg: str) -> None:
        status, error = tgi(ApiError(400, "bad_request", msg))
        body = to_json(error)
        head = [
            f"HTTP/1.1 {status} Bad Request",
            "content-type: application/json",
            f"content-length: {len(body)}",
            f"{HEADER}: {uuid.uuid4().hex}",
            "connection: close",
        ]
        self.transport.write("\r\n".join([*head, "", ""]).encode() + body)
        self.transport.close()


class InheritedConnection(HttpProtocol):
    """A connection that ends with the answer on it. What its client sends meanwhile (a pipelined request, of
    which a dead gateway may have had the first part) is not answered.
    """

    def data_received(self, data: bytes) -> None:
        pass
