"""Answer: describes an answer when its request is accepted, with all that its rendering needs."""

import time
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version

from common.messages.answer import HttpAnswer, Rendering
from common.messages.request import Generate

FINGERPRINT = f"tokenfleet-{version('tokenfleet')}"


def describe_answer(
    request_id: str,
    route: str,
    streamed: bool,
    model: str,
    requests: Sequence[Generate],
    prefixes: Sequence[str],
    rendering: Rendering,
    created_s: int | None = None,
) -> HttpAnswer:
    """The answer to validated requests: those of the choices of the first prompt, then those of the next.

    Args:
        prefixes: for each prompt, the text with which its choices begin.
        created_s: now if it is not given.
    """
    n = len(requests) // len(prefixes)
    return HttpAnswer(
        request_id,
        route,
        streamed,
        int(time.time()) if created_s is None else created_s,
        model,
        FINGERPRINT,
        n,
        [request.prompt_ids for request in requests[::n]],
        [replace(request, prompt_ids=b"") for request in requests],
        list(prefixes),
        rendering,
    )
