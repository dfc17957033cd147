"""Terms and headers of an answer: whose it is, how long it waits for its client, and TGI's counts and times,
which accounting proxies read.
"""

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from starlette.requests import Request

from api.answers.answer import AnswerTerms, HttpAnswer
from api.errors import invalid
from api.http.auth import key_of, sent_key
from api.http.idempotency import idempotency_key
from api.http.middleware import request_id
from api.requests.fields import RESUMES_S
from api.requests.metrics import durations
from api.requests.service_terms import tenant_of
from api.streams.stream import Stream
from common.broker.keys import RESULT_TTL_MS
from common.messages.request import Generate

RESUME_HEADER = "x-resume-seconds"


def read_terms(
    request: Request, request_id: str, streamed: bool, resume_s: float | None, detached: bool | None
) -> AnswerTerms:
    """To whom the answer belongs, and how long it waits for a client that comes back. Raises ApiError (422).

    Args:
        resume_s, detached: the fields of the body.
    """
    given = request.headers.get(RESUME_HEADER)
    if given is not None and resume_s is not None:
        raise invalid(f"give the header `{RESUME_HEADER}` or the field `resume_s`, not both", "resume_s")
    name, seconds = "resume_s" if given is None else RESUME_HEADER, resume_s
    if given is not None:
        try:
            seconds = float(given)
        except ValueError:
            seconds = -1.0  # it is refused as any number that is too low
    if seconds is not None and not RESUMES_S.holds(seconds):
        raise invalid(f"`{name}` must be {RESUMES_S} seconds", name)
    if detached and seconds is not None:
        raise invalid(f"`detached` waits for no client: leave `{name}` out", name)
    if not streamed and (seconds or detached):
        field = "detached" if detached else name
        raise invalid(f"`{field}` needs a stream: only its client can come back", field)
    return AnswerTerms(
        owner_of(request, request_id),
        resume_ms=None if seconds is None else round(1000 * seconds),
        detached=bool(detached),
        goes_on_s=math.inf if detached else seconds,
        kept_s=RESULT_TTL_MS / 1000 if detached else seconds or 0.0,
    )


def owner_of(request: Request, request_id: str) -> str:
    """Digest of a client's tenant, or without such keys of the API key that it sent, another one for each
    request; empty without a key. Raises ApiError as `tenant_of`.
    """
    owner = owner_bytes(request)
    salt = request_id.encode()[: hashlib.blake2b.MAX_KEY_SIZE]
    return hashlib.blake2b(owner, key=salt, digest_size=16).hexdigest() if owner else ""


def owner_bytes(request: Request) -> bytes:
    """A client's tenant, or without such keys the API key that it sent. Raises ApiError as `tenant_of`."""
    return b"tenant " + tenant_of(request).encode() if key_of(request) else sent_key(request)[1]


def answer_id(request: Request) -> str:
    """The id of a request's answer: that of the request, or with an `Idempotency-Key` the id that the key and
    its owner have. Raises ApiError: 400, and as `tenant_of`.
    """
    if not (key := idempotency_key(request)):
        return request_id(request)
    owner = hashlib.blake2b(owner_bytes(request)).digest()
    return hashlib.blake2b(key.encode(), key=owner, digest_size=16).hexdigest()


def total_headers(
    answer: HttpAnswer, streams: Sequence[Stream], num_generated: int, arrived_s: float
) -> dict[str, str]:
    """Headers of finished streams: token counts, and the times of the one that ended last; `arrived_s` is the
    monotonic time of the request's arrival.
    """
    seconds = durations(max(streams, key=lambda stream: stream.times.ended_s), arrived_s)
    return {f"x-{name}": str(round(1000 * value)) for name, value in seconds.items()} | {
        "x-compute-time": f"{seconds['total-time']:.6f}",
        "x-prompt-tokens": str(answer.num_prompt_tokens),
        "x-generated-tokens": str(num_generated),
    }


def with_adapter(requests: Iterable[Generate], adapter: str) -> list[Generate]:
    """The requests with the adapter that has this key; an empty one leaves them as they are."""
    return [replace(one, adapter=adapter) if adapter else one for one in requests]
