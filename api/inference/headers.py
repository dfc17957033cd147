"""Headers of a response: TGI's counts and times, which accounting proxies read."""

from collections.abc import Sequence

from api.inference.metrics import durations
from api.streams.stream import Stream
from common.messages.answer import HttpAnswer
from common.settings.settings import Settings


def prompt_headers(settings: Settings, num_chars: int) -> dict[str, str]:
    """Headers that are known before the first token; `num_chars` is the prompt's length."""
    compute_type = {"x-compute-type": settings.compute_type} if settings.compute_type else {}
    return compute_type | {"x-compute-characters": str(num_chars)}


def time_headers(stream: Stream, arrived_s: float) -> dict[str, str]:
    """Headers of a finished stream; `arrived_s` is the monotonic time of the request's arrival."""
    seconds = durations(stream, arrived_s)
    return {f"x-{name}": str(round(1000 * value)) for name, value in seconds.items()} | {
        "x-compute-time": f"{seconds['total-time']:.6f}",
        "x-prompt-tokens": str(len(stream.prompt_ids)),
        "x-generated-tokens": str(stream.num_tokens),
    }


def total_headers(
    answer: HttpAnswer, streams: Sequence[Stream], num_generated: int, arrived_s: float
) -> dict[str, str]:
    """Headers of several finished streams: token counts of all, and the times of the one that ended last."""
    last = max(streams, key=lambda stream: stream.times.ended_s)
    totals = {"x-prompt-tokens": str(answer.num_prompt_tokens), "x-generated-tokens": str(num_generated)}
    return time_headers(last, arrived_s) | totals
