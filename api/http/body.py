"""The bytes of a request's body, and the shape that they are to have."""

from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from api.errors import ApiError, invalid
from api.offload import offload

Shape = TypeVar("Shape", bound=BaseModel)
MAX_PROBLEMS = 5


async def read(request: Request, shape: type[Shape], max_bytes: int) -> Shape:
    """The body as a `shape`. Raises ApiError: 413, 415, 400 where it is not JSON, 422 that names the fields at
    fault.
    """
    check_content_type(request)
    data = await content(request, max_bytes)
    return await offload(len(data), lambda: shaped(shape, data))


def shaped(shape: type[Shape], data: bytes) -> Shape:
    """JSON as a `shape`. Raises ApiError: 400 where it is none, 422 that names the fields at fault."""
    try:
        return shape.model_validate_json(data)
    except ValidationError as error:
        raise shape_error(error) from error


def shape_error(error: ValidationError) -> ApiError:
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    if problems[0]["type"] == "json_invalid":
        return ApiError(400, "invalid_json", problems[0]["msg"])
    fields = [".".join(map(str, one["loc"])) or "body" for one in problems[:MAX_PROBLEMS]]
    return invalid(
        "; ".join(f"`{field}`: {one['msg']}" for field, one in zip(fields, problems, strict=False)), fields[0]
    )


def check_content_type(request: Request) -> None:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise ApiError(
            415, "unsupported_media_type", "Expected request with `Content-Type: application/json`"
        )


async def content(request: Request, max_bytes: int) -> bytes:
    """The body, read no further than up to its limit."""
    too_large = ApiError(413, "payload_too_large", f"The body is larger than {max_bytes} bytes")
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise too_large
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > max_bytes:
            raise too_large
    return bytes(data)
