"""API errors: why a request cannot be served, with the status and the error object of each API family."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from common.broker.client import CONNECT_TIMEOUT_S, ERRORS, describe_error
from common.messages.events import Terminal

MAX_QUOTED_CHARS = 200
MAX_TEXT_CHARS = 2000

PREFIXES = {
    "validation": "Input validation error: ",
    "template_error": "Template error: ",
    "tool_error": "Tool error: ",
}
"""TGI's prefixes of an error's text, by its type."""
OPENAI_STATUS = {422: 400, 424: 500}
OPENAI_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    408: "timeout",
    429: "rate_limit_exceeded",
}
ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
INSUFFICIENT_QUOTA = "insufficient_quota"
OPENAI_CODES = {401: "invalid_api_key", 429: "rate_limit_exceeded"}
LOADING_S = 5
"""When to ask again for a model that is still loaded, in seconds."""
ADMITTED = (408, 424)
"""Statuses of requests that were admitted and then failed, or missed their deadline."""


NAMED = re.compile("`([^`]+)`")
"""The name of a field in an error."""


def cut(text: str) -> str:
    """The beginning of what a client wrote, for an error that repeats it."""
    return text if len(text) <= MAX_QUOTED_CHARS else f"{text[:MAX_QUOTED_CHARS]}…"


def quoted(value: object) -> str:
    """A value that a client gave, for an error that repeats it."""
    return cut(repr(value[: MAX_QUOTED_CHARS + 1] if isinstance(value, str) else value))


class ApiError(Exception):
    """A request that is not served, and why.

    Attributes:
        status, error_type: those of TGI's routes; OpenAI's follow from them.
        text: for people; input of a client is repeated in it only `quoted` or `cut`.
        param: the field at fault, by the name that the client used.
        code: OpenAI's word for the cause, if its clients look for one.
        retry_after_s: when to ask again; None if that is not known.
        headers: of the response, besides those that follow from the other attributes.
        overflow: of a request beyond the model's context, its number of tokens and the most that fit.
    """

    def __init__(
        self,
        status: int,
        error_type: str,
        text: str,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
        headers: Mapping[str, str] = MappingProxyType({}),
        overflow: tuple[int, int] | None = None,
    ) -> None:
        self.status = status
        self.error_type = error_type
        self.text = text[:MAX_TEXT_CHARS]  # a library's text may repeat anything
        self.param = param and cut(param)
        self.code = code
        self.retry_after_s = retry_after_s
        self.headers = headers
        self.overflow = overflow
        super().__init__(self.text)

    def rename(self, names: Mapping[str, str]) -> None:
        """Let it name fields as the API that was asked does.

        Args:
            names: patterns of the names that it may have → the other names; the first that fits counts.
        """

        def new_name(field: str) -> str:
            found = (name and re.fullmatch(pattern, field) for pattern, name in names.items())
            return next((match.expand(names[match.re.pattern]) for match in found if match), field)

        self.text = NAMED.sub(lambda named: f"`{new_name(named[1])}`", self.text)
        self.param = self.param and new_name(self.param)
        self.args = (self.text,)


# --- API families -------------------------------------------------------------------------------------------

Family = Callable[[ApiError], tuple[int, dict[str, Any]]]
"""Status and error object of an error, as the clients of one API expect them."""


def tgi(error: ApiError) -> tuple[int, dict[str, Any]]:
    text = PREFIXES.get(error.error_type, "") + error.text
    return error.status, {"error": text, "error_type": error.error_type}


def kserve(error: ApiError) -> tuple[int, dict[str, Any]]:
    status, body = tgi(error)
    return status, {"error": body["error"]}


def openai(error: ApiError) -> tuple[int, dict[str, Any]]:
    status = OPENAI_STATUS.get(error.status, error.status)
    kind = OPENAI_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    code = error.code or OPENAI_CODES.get(status)
    kind = INSUFFICIENT_QUOTA if code == INSUFFICIENT_QUOTA else kind
    return status, {"error": {"message": error.text, "type": kind, "param": error.param, "code": code}}


def anthropic(error: ApiError) -> tuple[int, dict[str, Any]]:
    status = OPENAI_STATUS.get(error.status, error.status)
    kind = ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    text = error.text
    if error.overflow:  # Claude Code makes a chat shorter when it reads this sentence
        text = "prompt is too long: {} tokens > {} maximum. {}".format(*error.overflow, text)
    return status, {"type": "error", "error": {"type": kind, "message": text}}


# --- causes -------------------------------------------------------------------------------------------------


def invalid(detail: str, param: str | None = None) -> ApiError:
    """What is wrong with a field: by default the first one that `detail` names."""
    named = NAMED.search(detail)
    return ApiError(422, "validation", detail, param or (named and named[1]))


def refuse(*cases: tuple[object, *tuple[str, ...]]) -> None:
    """Raises ApiError (422) for the first case that there is.

    Args:
        cases: whether it is there, and what `invalid` is told.
    """
    for is_there, *about in cases:
        if is_there:
            raise invalid(*about)


def text_of(given: Mapping[str, Any], key: str, place: str) -> str:
    """A value of the object at this place, which must be a string. Raises ApiError."""
    value = given.get(key)
    if not isinstance(value, str):
        raise invalid(f"`{place}.{key}` must be a string")
    return value


def not_one_of(field: str, allowed: Iterable[str], given: object) -> ApiError:
    """What is wrong with a field that has none of the values that it may have."""
    return invalid(f"`{field}` must be one of {', '.join(allowed)}. Given: {quoted(given)}")


def too_long(detail: str, param: str, max_total_tokens: int, overflow: tuple[int, int]) -> ApiError:
    """A request beyond the model's context. litellm and LangChain look for this code and sentence."""
    sentence = f"{detail}. This model's maximum context length is {max_total_tokens} tokens"
    return ApiError(422, "validation", sentence, param, "context_length_exceeded", overflow=overflow)


def model_not_found(text: str) -> ApiError:
    return ApiError(404, "model_not_found", text, param="model", code="model_not_found")


def overloaded(
    why: str = "", retry_after_s: int = 1, headers: Mapping[str, str] = MappingProxyType({})
) -> ApiError:
    text = f"Model is overloaded{why}"
    return ApiError(429, "overloaded", text, retry_after_s=retry_after_s, headers=headers)


def insufficient_quota(why: str, retry_after_s: int | None = None) -> ApiError:
    """A request for which its API key's budget has no room. OpenAI's clients know the code."""
    text = f"The budget of your API key for this month has no room for this request{why}"
    return ApiError(429, INSUFFICIENT_QUOTA, text, code=INSUFFICIENT_QUOTA, retry_after_s=retry_after_s)


def conflict(what: str) -> ApiError:
    return ApiError(409, "conflict", f"another {what} has this id", code="conflict")


def unavailable(why: str, retry_after_s: int | None = None) -> ApiError:
    text = f"Service unavailable: {why}"
    return ApiError(503, "unavailable", text, code="unavailable", retry_after_s=retry_after_s)


def internal_error(text: str = "Internal error") -> ApiError:
    return ApiError(500, "internal", text)


def failed(terminal: Terminal) -> ApiError:
    """The error of a request that was admitted and did not finish. Its type is OpenAI's code, too.

    It is the client's error if no token fits the grammar any more (422), or if its key counts no more (401).
    """
    kind = terminal.error_type or "generation"
    status = {"timeout": 408, "grammar": 422, "unauthorized": 401}.get(kind, 424)
    why = terminal.error or f"the request was {terminal.reason}"
    return ApiError(status, kind, f"Request failed during generation: {why}", code=kind)


@contextlib.contextmanager
def broker_errors() -> Iterator[None]:
    """Turn the broker's errors into ApiError (503)."""
    try:
        yield
    except ERRORS as error:
        raise unavailable(describe_error(error)) from error


async def asks_broker() -> AsyncIterator[None]:
    """Turn the broker's errors into ApiError (503), and an answer that does not come in time: a dependency of
    routes that do nothing else.
    """
    with broker_errors():
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            yield


asking_broker = contextlib.asynccontextmanager(asks_broker)
