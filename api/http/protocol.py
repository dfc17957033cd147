"""HTTP as the server reads it. What cannot be read reaches no route; it is refused in TGI's words all the
same.
"""

import uuid

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from api.errors import Refusal, encode, tgi
from api.http.request_id import HEADER


class Http(HttpToolsProtocol):
    """One connection of a client."""

    def send_400_response(self, msg: str) -> None:
        status, error = tgi(Refusal(400, "bad_request", msg))
        body = encode(error)
        head = [
            f"HTTP/1.1 {status} Bad Request",
            "content-type: application/json",
            f"content-length: {len(body)}",
            f"{HEADER}: {uuid.uuid4().hex}",
            "connection: close",
        ]
        self.transport.write("\r\n".join([*head, "", ""]).encode() + body)
        self.transport.close()
