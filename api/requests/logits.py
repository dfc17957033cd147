"""Logits in a request: which of them its answer returns, and whether they are within MAX_LOGITS_BYTES."""

from collections.abc import Sequence
from dataclasses import replace

from pydantic import BaseModel

from api.errors import invalid, unavailable
from api.requests.params import GenerationParams, Limits
from common.messages.request import Generate, LogitsParams

MAX_LOGITS_BYTES = 64 * 2**20
"""Of one answer: the broker and the gateway hold them until it is sent."""

FIELDS = ("return_context_logits", "return_generation_logits")


def check_not_streamed(body: BaseModel, streamed: bool | None) -> None:
    """Raises ApiError (422) for a stream with logits: they are megabytes, and come with the whole answer."""
    for name in FIELDS:
        if streamed and getattr(body, name):
            raise invalid(f"`{name}` must be false when tokens are streamed", name)


def check_no_logits(params: GenerationParams) -> None:
    """Raises ApiError (422) for logits at a route whose answers have no place for them."""
    for name, given in zip(FIELDS, (params.context_logits, params.generation_logits), strict=True):
        if given:
            raise invalid(f"`{name}` is not a field of this route", name)


def with_logits(requests: Sequence[Generate], params: GenerationParams, limits: Limits) -> list[Generate]:
    """The requests of one prompt, with the logits that their answers return: those of the prompt with the
    first one. Raises ApiError (422, 503).
    """
    if not (params.context_logits or params.generation_logits):
        if params.logits_dtype is not None:
            raise invalid(f"`logits_dtype` needs `{FIELDS[0]}` or `{FIELDS[1]}`", "logits_dtype")
        return [*requests]
    if any(request.beams for request in requests):
        name = FIELDS[0] if params.context_logits else FIELDS[1]
        raise invalid(f"`{name}` and a beam search exclude each other", name)
    if not limits.vocab_size:
        raise unavailable("no worker that is ready returns logits")
    dtype = limits.dtype if params.logits_dtype == "model" else "float32"
    first = LogitsParams(params.context_logits, params.generation_logits, dtype, limits.vocab_size)
    others = replace(first, context=False) if params.generation_logits else None
    found = [replace(request, logits=others if i else first) for i, request in enumerate(requests)]
    check_size(found)
    return found


def check_size(requests: Sequence[Generate]) -> None:
    """Raises ApiError (422) if the requests of one answer may return more logits than MAX_LOGITS_BYTES."""
    need = sum(request.logits_bytes for request in requests)
    if need <= MAX_LOGITS_BYTES:
        return
    logits = next(request.logits for request in requests if request.logits)
    names = [name for name, given in zip(FIELDS, (logits.context, logits.generation), strict=True) if given]
    rows = need // logits.row_bytes
    raise invalid(
        f"`{'` and `'.join(names)}` may take at most {MAX_LOGITS_BYTES} bytes. "
        f"Given: {need} bytes, for {rows} tokens with {logits.vocab_size} logits of {logits.dtype} each",
        names[0],
    )
