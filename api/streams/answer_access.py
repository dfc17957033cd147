"""Answer access: what the access log says of an answer, or of a job's: its model, tenant, tokens and times;
and what is counted of all its choices together.
"""

from collections.abc import Sequence

from api.http.access_log import AccessRecord
from api.streams.answer_trace import first_token_s
from api.streams.stream import Stream
from common.messages.events import Terminal
from common.metrics import catalogue


def note_streams(record: AccessRecord, model: str, streams: Sequence[Stream], left: str) -> None:
    """Note what has come of all choices. `left` is the reason of one that has not ended."""
    request = streams[0].request
    first_s = first_token_s(streams)
    queued = [stream.times.placed_s - stream.times.started_s for stream in streams if stream.times.placed_s]
    reasons = dict.fromkeys(reason_of(stream.terminal) if stream.terminal else left for stream in streams)
    failures = (stream.terminal.error for stream in streams if stream.terminal and not stream.finished)
    record.note(
        {
            "model": model,
            "key": request.key_id,
            "tenant": request.tenant,
            "class": request.service_class,
            "prompt_tokens": sum(map(len, {stream.request.prompt_ids for stream in streams})) // 4,
            "cached_tokens": streams[0].num_cached,
            "completion_tokens": sum(one.num_tokens for stream in streams for one in stream.outputs),
            "choices": len(streams) if len(streams) > 1 else None,
            "queue_s": round(max(queued), 3) if queued else None,
            "first_token_s": round(first_s - record.started_s, 3) if first_s else None,
            "reason": ",".join(reasons),
            "error": next(failures, None),
        }
    )


def count_longest(streams: Sequence[Stream]) -> None:
    """Count the tokens of the longest choice of an answer, if all have finished."""
    if all(stream.finished for stream in streams):
        lengths = (one.num_tokens for stream in streams for one in stream.outputs)
        catalogue.LONGEST_CHOICE.observe(max(lengths))


def reason_of(terminal: Terminal) -> str:
    """Why an answer ended; of one that failed, the type of its error, as its client reads it."""
    return terminal.error_type or "generation" if terminal.reason == "error" else terminal.reason
