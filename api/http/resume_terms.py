"""Resume terms: how long an answer waits for a client that comes back, and to whom it belongs."""

import hashlib
import math

from starlette.requests import Request

from api.errors import invalid
from common.messages.answer import ResumeTerms

HEADER = "x-resume-seconds"
MAX_RESUME_S = 3600


def read_terms(
    request: Request, request_id: str, streamed: bool, resume_s: float | None, detached: bool | None
) -> ResumeTerms:
    """The terms that a client asks for. Raises ApiError (422).

    Args:
        resume_s, detached: the fields of the body.
    """
    given = request.headers.get(HEADER)
    if given is not None and resume_s is not None:
        raise invalid(f"give the header `{HEADER}` or the field `resume_s`, not both", "resume_s")
    name, seconds = ("resume_s", resume_s) if given is None else (HEADER, read_seconds(given))
    if seconds is not None and not 0 <= seconds <= MAX_RESUME_S:
        raise invalid(f"`{name}` must be at least 0 and at most {MAX_RESUME_S} seconds", name)
    if detached and seconds is not None:
        raise invalid(f"`detached` waits for no client: leave `{name}` out", name)
    if not streamed and (seconds or detached):
        field = "detached" if detached else name
        raise invalid(f"`{field}` needs a stream: only its client can come back", field)
    resume_ms = None if seconds is None else round(1000 * seconds)
    return ResumeTerms(owner_of(request, request_id), resume_ms, bool(detached))


def read_seconds(text: str) -> float:
    """The number in a header; NaN for anything else."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def owner_of(request: Request, request_id: str) -> str:
    """Digest of the API key that a client sent, another one for each request; empty without a key."""
    _, _, key = request.headers.get("authorization", "").partition(" ")
    if not key.strip():
        return ""
    salt = request_id.encode()[: hashlib.blake2b.MAX_KEY_SIZE]
    return hashlib.blake2b(key.strip().encode("latin-1"), key=salt, digest_size=16).hexdigest()
