"""How a request ends: its terminal, and the answer that stays under `result:{request}`."""

import json

from common.messages.events import Terminal
from common.messages.records import unpack_records
from common.messages.request import Generate

FINISHED = ("length", "eos_token", "stop_sequence")
"""Why a row ends with a whole answer."""
INTERRUPTED = ("preempted", "takeover")
"""Why a row ends although its request goes on, in another row."""
ERRORS = {
    "timeout": ("timeout", "the request was not finished before its deadline"),
    "poison": ("generation", "two workers died while they worked on this request"),
    "capacity": ("generation", "no worker's KV cache can hold this request"),
    "malformed": ("generation", "the queued request cannot be read"),
}
"""Why a request is ended against its will → (error type, error). What is named nowhere here is a cancel."""


def terminal_for(request_id: str, why: str, num_tokens: int) -> Terminal:
    """The terminal for a reason as rows, queues and deadlines name it."""
    if why in FINISHED:
        return Terminal(request_id, why, num_tokens)
    if why in ERRORS:
        kind, text = ERRORS[why]
        return Terminal(request_id, "error", num_tokens, text, kind)
    return Terminal(request_id, "cancelled", num_tokens, f"cancelled: {why}", "cancelled")


def error_result(end: Terminal) -> str:
    """The answer (JSON) of a request that did not finish."""
    return json.dumps({"id": end.request_id, "error": end.error, "error_type": end.error_type})


def final_result(request: Generate, end: Terminal, text: str, records: bytes) -> str:
    """The answer (JSON) of a request that finished."""
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
