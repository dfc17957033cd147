"""Finish reasons: why rows and requests end, their terminals, and what is kept of them."""

from common.messages.events import Terminal

FINISHED = ("length", "eos_token", "stop_sequence")
"""Reasons of rows whose request is complete."""
INTERRUPTED = ("preempted", "takeover")
"""Reasons of rows whose request goes on in another row."""
ERRORS = {
    "timeout": ("timeout", "the request was not finished before its deadline"),
    "expired": ("timeout", "the request's deadline passed while it waited: it never started"),
    "poison": ("generation", "three workers died while they worked on this request"),
    "capacity": ("generation", "no worker's KV cache can hold this request"),
    "forward": ("generation", "the model's forward failed for this request"),
    "grammar": ("grammar", "the request's grammar allows none of the tokens that are left"),
    "grammar_limit": (
        "grammar",
        "the request's grammar is too complex: the tokens that it allows next take too much work to find",
    ),
    "no_worker": ("unavailable", "no worker is left, and none started within WORKER_GRACE_S"),
    "malformed": ("generation", "the queued request cannot be read"),
}
"""Reason of a failed request → (error type, error text). A reason that is not listed here is a cancel."""


def terminal_for(request_id: str, why: str, num_tokens: int) -> Terminal:
    """Return the terminal of a request that ended for the reason `why`."""
    if why in FINISHED:
        return Terminal(request_id, why, num_tokens)
    if why in ERRORS:
        kind, text = ERRORS[why]
        return Terminal(request_id, "error", num_tokens, text, kind)
    return Terminal(request_id, "cancelled", num_tokens, f"cancelled: {why}", "cancelled")


def kept_records(end: Terminal, records: bytes) -> bytes:
    """Return what is kept of a request's packed records: of one that failed or was cancelled nothing."""
    return records if end.reason in FINISHED else b""
