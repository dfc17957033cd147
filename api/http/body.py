"""Body: reads the JSON body of a request, and validates it against a schema.

Unsupported fields are refused by name: a client would take silence for support. Unknown ones have no effect,
and the log names them.

A client that does not know whether its request arrived sends it again, with the same `Idempotency-Key`
(draft-ietf-httpapi-idempotency-key-header; Stripe's semantics). Both have one answer: the key gives it its
id, the same one at every gateway. Admission knows each id once, so it decides which of two requests is the
first. The other one is replayed (api/resume/rest.py).
"""

import contextlib
import hashlib
import logging
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from functools import partial
from typing import TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.requests import Request

from api.errors import ApiError, cut, invalid, quoted
from api.event_loop import offload
from api.json import TooDeep, is_depth_error, parse_bytes
from api.requests.fields import Strict
from common import ids

Schema = TypeVar("Schema", bound=BaseModel)
UnsupportedFields = Mapping[str, Collection[object]]
"""Fields of an API that this server does not support → values (besides null) that are accepted, because they
ask for what happens anyway.
"""
GONE_FIELDS = {"receipt": "the same request with the same `seed` gives the same tokens"}
"""Fields that have left every API → what serves in their place. False asks for what happens anyway."""
LABELS = {
    *("metadata", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier"),
    *("store", "user", "verbosity", "cache_control", "context_management", "speed"),
}
"""Fields of other servers that have no effect here, as their APIs allow."""
MAX_PROBLEMS = 5
MAX_WARNED = 100

log = logging.getLogger(__name__)
warned: set[str] = set()
"""Unknown fields that the log has: each name once."""


class AnyBody(BaseModel):
    """A JSON object with any fields: only their names are read, `model_fields_set`."""

    model_config = ConfigDict(extra="allow")


async def read(request: Request, schema: type[Schema], max_bytes: int) -> Schema:
    """The validated body. Raises ApiError: 413, 415, and those of `parse_body`."""
    return await parse(schema, await read_json(request, max_bytes))


async def parse(schema: type[Schema], data: bytes) -> Schema:
    """What `parse_body` makes of a body of any length."""
    return await offload(len(data), lambda: parse_body(schema, data))


async def read_json(request: Request, max_bytes: int) -> bytes:
    """The bytes of a body whose headers say that it is plain JSON. Raises ApiError: 413, 415."""
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        why = f"Bodies are not decoded: send them without `Content-Encoding: {cut(encoding)}`"
        raise ApiError(415, "unsupported_media_type", why)
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        why = "Expected request with `Content-Type: application/json`"
        raise ApiError(415, "unsupported_media_type", why)
    return await read_bytes(request, max_bytes)


def parse_body(schema: type[Schema], data: bytes) -> Schema:
    """Validate JSON. Raises ApiError: 400 if it is not JSON, 422 with the names of the fields at fault."""
    try:
        parsed = schema.model_validate_json(data)
    except ValidationError as error:
        raise schema_error(error) from error
    if isinstance(parsed, Strict):
        parsed.check()
    return parsed


def schema_error(error: ValidationError, *within: str) -> ApiError:
    """What is wrong with a body, or with what has the name `within`."""
    problems = error.errors(include_url=False, include_context=False)
    if problems[0]["type"] == "json_invalid":
        is_deep = is_depth_error(problems[0]["msg"])
        return ApiError(400, "invalid_json", f"Invalid JSON: {TooDeep()}" if is_deep else problems[0]["msg"])
    named = []
    for problem in problems[:MAX_PROBLEMS]:  # with the given value if one of a few or of a range is expected
        is_bounded = problem["type"].startswith(("literal", "greater", "less"))
        given = f". Given: {quoted(problem['input'])}" if is_bounded else ""
        named.append((field_name((*within, *problem["loc"])), problem["msg"] + given))
    return invalid("; ".join(f"`{field}`: {words}" for field, words in named), named[0][0])


def field_name(path: Sequence[str | int]) -> str:
    """A path to a field as text: `messages[0].content`, or `body` if it is empty."""
    steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return cut("".join(steps).removeprefix(".")) or "body"


async def read_chunks(request: Request, max_bytes: int, too_large: ApiError) -> AsyncGenerator[bytes, None]:
    """The body as it comes; reading stops beyond its limit, or at once if the request says that it is longer.
    Raises `too_large`.
    """
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise too_large
    async for chunk in request.stream():
        max_bytes -= len(chunk)
        if max_bytes < 0:
            raise too_large
        yield chunk


def too_large(max_bytes: int) -> ApiError:
    return ApiError(413, "payload_too_large", f"The body is larger than {max_bytes} bytes")


async def read_bytes(request: Request, max_bytes: int) -> bytes:
    """The body, whose digest is noted if its request may be repeated. Raises ApiError (413)."""
    whole = b"".join([chunk async for chunk in read_chunks(request, max_bytes, too_large(max_bytes))])
    if IDEMPOTENCY_KEY in request.headers and not noted_digest(request):
        # with the path that the client called, whatever route serves it in the end
        request.state.body_digest = await offload(len(whole), partial(digest_of, request.url.path, whole))
    return whole


def reject_unsupported(
    fields: Mapping[str, object], unsupported: UnsupportedFields, other_routes: Collection[str]
) -> None:
    """Raises ApiError (422) for unsupported fields, and for fields that only other routes have."""
    for name, value in fields.items():
        if value is None or value in unsupported.get(name, ()):
            continue
        if name in GONE_FIELDS and value is not False:
            raise invalid(f"`{name}` is not served any more: {GONE_FIELDS[name]}")
        if name in unsupported:
            raise invalid(f"`{name}` is not supported yet")
        if name in other_routes:
            raise invalid(f"`{name}` is not a field of this route")
    others = {name: value for name, value in fields.items() if name not in unsupported}
    warn_of_unknown({name: value for name, value in others.items() if name not in GONE_FIELDS})


def warn_of_unknown(fields: Mapping[str, object]) -> None:
    """Log the name of each field once, up to MAX_WARNED names; null fields are as good as absent."""
    for name, value in fields.items():
        if value is None or name in LABELS or name in warned or len(warned) == MAX_WARNED:
            continue
        warned.add(name)
        log.warning("a request has the unknown field %s, which has no effect", quoted(name))


# --- idempotency --------------------------------------------------------------------------------------------


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
