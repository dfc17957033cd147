"""Finish reasons: why rows and requests end, their terminals, and their results in `result:{request}`."""

import json

from common.messages.events import Terminal
from common.messages.records import unpack_records
from common.messages.request import Generate

FINISHED = ("length", "eos_token", "stop_sequence")
"""Reasons of rows whose request is complete."""
INTERRUPTED = ("preempted", "takeover")
"""Reasons of rows whose request goes on in another row."""
ERRORS = {
    "timeout": ("timeout", "the request was not finished before its deadline"),
    "poison": ("generation", "two workers died while they worked on this request"),
    "capacity": ("generation", "no worker's KV cache can hold this request"),
    "grammar": ("generation", "the request's grammar allows none of the tokens that are left"),
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


def error_result(end: Terminal) -> str:
    """Return the result (JSON) of a request that failed or was cancelled."""
    return json.dumps({"id": end.request_id, "error": end.error, "error_type": end.error_type})


def final_result(request: Generate, end: Terminal, text: str, records: bytes) -> str:
    """Return the result (JSON) of a complete request."""
    ids, logprobs, tops = unpack_records(records, request.width)
    body = {
        "id": request.request_id,
        "generated_text": text,
        "finish_reason": end.reason,
        "prompt_tokens": len(request.prompt_ids) // 4,
        "generated_tokens": len(ids),
        "ids": ids,
        "logprobs": logprobs,
        "tops": tops,
    }
    return json.dumps(body, ensure_ascii=False)
