"""Request reader: the requests on one connection, as RFC 9110 and RFC 9112 have them read.

h11 parses; here stand the rules that it leaves to servers, and the bounds of what a request may cost.
"""

import contextlib
from urllib.parse import urlsplit

import h11

MAX_HEADERS = 128
"""Header fields of a request; each costs some microseconds, however short it is."""
FREE_CHUNKS = 512
BYTES_A_CHUNK = 64
"""A body may come in FREE_CHUNKS chunks, and one more for each BYTES_A_CHUNK of its bytes: a chunk takes as
long as some kilobytes, so a body in chunks of single bytes costs a thousand times what it weighs.
"""
UNREADABLE = "Invalid HTTP request received."
EMPTY_LINES = b"\r\n"

TOO_LARGE, NOT_IMPLEMENTED, VERSION_NOT_SUPPORTED = 431, 501, 505


class Refusal(h11.RemoteProtocolError):
    """A request that h11 would accept; its text is for the client."""


class RequestReader(h11.Connection):
    """Reads requests, and keeps track of the responses.

    Attributes:
        refusal: status and text for a client whose bytes are no HTTP, or not served; None if they are.
    """

    def __init__(self, max_head_bytes: int) -> None:
        super().__init__(h11.SERVER, max_head_bytes)
        self.max_head_bytes = max_head_bytes
        self.refusal: tuple[int, str] | None = None
        self.chunks = 0
        self.body_bytes = 0

    @property
    def has_unread_bytes(self) -> bool:
        """Whether the client has sent something that is no part of a request yet."""
        return bool(self.trailing_data[0])

    def receive_data(self, data: bytes) -> None:
        """Take bytes of the client. Empty lines before a request are no part of it (RFC 9112, 2.2)."""
        if self.their_state is h11.IDLE and data[:1] in (b"\r", b"\n") and not self.has_unread_bytes:
            data = data.lstrip(EMPTY_LINES)
        if data:  # h11 takes no bytes for the end of the connection
            super().receive_data(data)

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """The next event of a request that is served. Raises h11.RemoteProtocolError; `refusal` says why."""
        try:
            event = super().next_event()
            if isinstance(event, h11.Request):
                self.chunks = self.body_bytes = 0
                check_size(event, self.max_head_bytes)
                check_framing(event)
                return served(event)
            if isinstance(event, h11.Data):
                self.count(event)
            return event
        except h11.RemoteProtocolError as error:
            # not the error itself: its traceback holds this reader, and all bytes in it
            text = str(error) if isinstance(error, Refusal) else UNREADABLE
            self.refusal = (error.error_status_hint, text)
            raise

    def count(self, data: h11.Data) -> None:
        self.chunks += data.chunk_start
        self.body_bytes += len(data.data)
        if self.chunks > FREE_CHUNKS + self.body_bytes // BYTES_A_CHUNK:
            raise Refusal(f"The body's chunks are too small: {self.chunks} for {self.body_bytes} bytes")


def check_size(request: h11.Request, max_head_bytes: int) -> None:
    """Raises Refusal for a head beyond its bounds; h11 bounds only those that come in parts."""
    size = len(request.target) + sum(len(name) + len(value) + 4 for name, value in request.headers)
    if size > max_head_bytes:
        raise Refusal(f"The request's head is longer than {max_head_bytes} bytes (MAX_HEAD_BYTES)", TOO_LARGE)
    if len(request.headers) > MAX_HEADERS:
        raise Refusal(f"The request has more than {MAX_HEADERS} header fields", TOO_LARGE)


def check_framing(request: h11.Request) -> None:
    """Raises Refusal for a request of which a proxy on its way may have read another length (RFC 9112, 6.1),
    and for one that no origin server serves.
    """
    names = {name for name, _ in request.headers}
    if not request.http_version.startswith(b"1."):
        version = request.http_version.decode()
        raise Refusal(f"HTTP/{version} is not served here: use HTTP/1.1", VERSION_NOT_SUPPORTED)
    if request.method == b"CONNECT":
        raise Refusal("CONNECT is not served here: this is no proxy", NOT_IMPLEMENTED)
    if b"transfer-encoding" in names and b"content-length" in names:
        raise Refusal("The request has both Content-Length and Transfer-Encoding")
    if b"transfer-encoding" in names and request.http_version < b"1.1":
        raise Refusal("A request of HTTP/1.0 cannot have Transfer-Encoding")


def served(request: h11.Request) -> h11.Request:
    """The request as the application sees it: without upgrades, of which none is supported (RFC 9110, 7.8);
    where its target is a whole URL, with the path and the host of that (RFC 9112, 3.2.2). Raises Refusal.
    """
    headers = [(name, value) for name, value in request.headers if name != b"upgrade"]
    target = request.target
    if target.startswith((b"/", b"*")):
        if len(headers) == len(request.headers):
            return request
    else:
        host, target = host_and_path(target)
        headers = [(name, host if name == b"host" else value) for name, value in headers]
    version = request.http_version
    return h11.Request(method=request.method, target=target, headers=headers, http_version=version)


def host_and_path(target: bytes) -> tuple[bytes, bytes]:
    """The host of a URL, and its path and query. Raises Refusal."""
    with contextlib.suppress(ValueError):  # of a host between brackets
        url = urlsplit(target)
        if url.scheme.lower() in (b"http", b"https") and url.netloc:
            return url.netloc, (url.path or b"/") + (b"?" + url.query if url.query else b"")
    raise Refusal("The request's target is neither a path nor a URL")
