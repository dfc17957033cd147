"""Saved answers: a file with a request and its answer, of which the receipt says how to ask for it again."""

from collections.abc import Mapping
from typing import Any, NamedTuple

ROUTES = {
    "text_completion": "/v1/completions",
    "chat.completion": "/v1/chat/completions",
    "response": "/v1/responses",
    "message": "/v1/messages",
}
"""`object` of an answer, or `type` of a message → the route that made it."""
GENERATE = "/generate"
NOT_AGAIN = ("stream", "stream_options", "resume_s", "detached", "background", "webhook")
"""Fields of a request that say how its answer was sent, and not what it is."""


class SavedAnswer(NamedTuple):
    """A request that was answered.

    Attributes:
        body: of the same request, with the same seed, for a whole answer with a receipt.
        receipt: of the answer.
    """

    route: str
    body: dict[str, Any]
    receipt: dict[str, Any]


def read_saved(content: Any) -> SavedAnswer:
    """Read `{"request": …, "answer": …}`, both as they were on the wire. Raises ValueError that names the
    field at fault.
    """
    if not isinstance(content, Mapping):
        raise ValueError("must be an object with `request` and `answer`")
    request, answer = content.get("request"), content.get("answer")
    if isinstance(answer, list) and len(answer) == 1:  # of `POST /`
        [answer] = answer
    if not isinstance(request, Mapping):
        raise ValueError("`request` must be the body of the request, an object")
    if not isinstance(answer, Mapping):
        raise ValueError("`answer` must be the whole answer, an object")
    receipt = find_receipt(answer)
    if receipt is None:
        raise ValueError('`answer` has no receipt: ask with `"receipt": true`, without a stream')
    if "inputs" not in request and not any(name in request for name in ("prompt", "messages", "input")):
        raise ValueError("`request` must have `inputs`, `prompt`, `messages` or `input`")
    kind = answer.get("object") or answer.get("type")
    route = GENERATE if "inputs" in request else ROUTES.get(kind) if isinstance(kind, str) else None
    if route is None:
        raise ValueError(f"`answer` must have `generated_text`, or be one of {', '.join(ROUTES)}")
    return SavedAnswer(route, body_again(request, receipt), receipt)


def find_receipt(answer: Mapping[str, Any]) -> dict[str, Any] | None:
    details = answer.get("details")
    found = answer.get("receipt") or (details.get("receipt") if isinstance(details, Mapping) else None)
    return found if isinstance(found, dict) else None


def result_receipt(answer: Any) -> dict[str, Any]:
    """The receipt of an answer that came to such a request. Raises LookupError without one."""
    found = find_receipt(answer) if isinstance(answer, Mapping) else None
    if found is None:
        raise LookupError("receipt")
    return found


def body_again(request: Mapping[str, Any], receipt: Mapping[str, Any]) -> dict[str, Any]:
    """The body of the same request. Raises ValueError if no seed makes its choices again."""
    body = {name: value for name, value in request.items() if name not in NOT_AGAIN}
    own: dict[str, Any] = {"receipt": True, **seed_field(receipt)}
    if "inputs" in request:
        return body | {"parameters": (request.get("parameters") or {}) | own}
    return body | own | ({"store": False} if "input" in request else {})


def seed_field(receipt: Mapping[str, Any]) -> dict[str, int]:
    """The field that draws the same tokens; none for greedy ones. Raises ValueError."""
    try:
        seeds = {choice["seed"] for choice in receipt["choices"]} - {None}
    except (LookupError, TypeError) as error:
        raise ValueError("`answer` has a receipt of an unknown shape") from error
    if len(seeds) > 1:
        raise ValueError(f"`answer` has choices of {len(seeds)} seeds, which no request asks for together")
    return {"seed": seeds.pop()} if seeds else {}
