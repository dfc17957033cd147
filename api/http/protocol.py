"""HTTP protocol: uvicorn's, with TGI's error object for requests that it cannot parse and that reach no
route.
"""

import uuid

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from api.errors import ApiError, tgi
from api.http.request_id import HEADER
from api.json import to_json


class HttpProtocol(HttpToolsProtocol):
    """One connection of a client."""

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
