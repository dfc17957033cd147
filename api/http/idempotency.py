"""Idempotency keys: a client that does not know whether its request arrived sends it again, with the same
`Idempotency-Key` (draft-ietf-httpapi-idempotency-key-header; Stripe's semantics). Both have one answer.

The key gives the answer its id, the same one at every gateway. Admission knows each id once, so it decides
which of two requests is the first. The other one is replayed (api/resume/replay.py).
"""

import contextlib
import hashlib
from functools import partial

import orjson
from starlette.requests import Request

from api.errors import ApiError, cut, quoted
from api.event_loop import offload
from api.json import parse_bytes
from common import ids

REPLAYED = "idempotency-replayed"
IDEMPOTENCY_KEY = "idempotency-key"
KEY_REUSED = "The `Idempotency-Key` was sent before with another route or body"
"""Of status 409."""


class Repeated(Exception):
    """A request with the `Idempotency-Key` of an earlier one, which has the answer with this id."""

    def __init__(self, request_id: str) -> None:
        super().__init__(request_id)
        self.request_id = request_id


def idempotency_key(request: Request) -> str:
    """The client's `Idempotency-Key`, without quotes; empty without one. Raises ApiError (400)."""
    if (given := request.headers.get(IDEMPOTENCY_KEY)) is None:
        return ""
    key = given.strip().removeprefix('"').removesuffix('"')
    if not ids.IDEMPOTENCY_KEY.fullmatch(key):
        text = f"`{IDEMPOTENCY_KEY}` must have 1 to 255 ASCII characters, without spaces. "
        raise ApiError(400, "validation", f"{text}Given: {quoted(given)}", IDEMPOTENCY_KEY)
    return key


async def note_body(request: Request, data: bytes) -> None:
    """Note the digest of a body that was read, if its request may be repeated: with the path that the client
    called, whatever route serves it in the end.
    """
    if IDEMPOTENCY_KEY in request.headers and not noted_digest(request):
        request.state.body_digest = await offload(len(data), partial(digest_of, request.url.path, data))


def noted_digest(request: Request) -> str:
    """Digest of the route and the body of a request; empty if the body was not read."""
    return getattr(request.state, "body_digest", "")


def check_same(request: Request, earlier: str) -> None:
    """Raises ApiError (409) if the earlier request with this key had another digest."""
    if earlier != noted_digest(request):
        text = (
            f"`{IDEMPOTENCY_KEY}`: keys for idempotent requests can only be used with the same route and body"
            f" they were first used with. Try another key than {cut(idempotency_key(request))!r}"
        )
        raise ApiError(409, "conflict", text, IDEMPOTENCY_KEY, code="idempotency_key_reused")


def digest_of(path: str, data: bytes) -> str:
    """Digest of a route and a body. JSON counts as what it says, whatever its spaces and the order of its
    fields.
    """
    content = data
    with contextlib.suppress(ValueError):
        content = orjson.dumps(parse_bytes(data), option=orjson.OPT_SORT_KEYS)
    return hashlib.blake2b(path.encode() + b"\0" + content, digest_size=16).hexdigest()
