"""Headers of a response: TGI's counts and times, which accounting proxies read."""

from collections.abc import Sequence

from api.streams.stream import Stream
from common.messages.answer import HttpAnswer
from common.settings.settings import Settings


def prompt_headers(settings: Settings, num_chars: int) -> dict[str, str]:
    """Headers that are known before the first token; `num_chars` is the prompt's length."""
    compute_type = {"x-compute-type": settings.compute_type} if settings.compute_type else {}
    return compute_type | {"x-compute-characters": str(num_chars)}


def time_headers(stream: Stream, started_s: float) -> dict[str, str]:
    """Headers of a finished stream; `started_s` is the monotonic time of the request's arrival."""
    total_s = stream.ended_s - started_s
    inference_s = stream.ended_s - stream.placed_s
    milliseconds = {
        "x-total-time": total_s,
        "x-validation-time": stream.started_s - started_s,
        "x-queue-time": stream.placed_s - stream.started_s,
        "x-inference-time": inference_s,
        "x-time-per-token": inference_s / max(1, stream.num_tokens),
    }
    return {name: str(round(1000 * value)) for name, value in milliseconds.items()} | {
        "x-compute-time": f"{total_s:.6f}",
        "x-prompt-tokens": str(len(stream.prompt_ids)),
        "x-generated-tokens": str(stream.num_tokens),
    }


def total_headers(
    answer: HttpAnswer, streams: Sequence[Stream], num_generated: int, arrived_s: float
) -> dict[str, str]:
    """Headers of several finished streams: token counts of all, and the times of the one that ended last."""
    last = max(streams, key=lambda stream: stream.ended_s)
    totals = {"x-prompt-tokens": str(answer.num_prompt_tokens), "x-generated-tokens": str(num_generated)}
    return time_headers(last, arrived_s) | totals
