"""TGI's headers of an answer: what it cost. Gateways of services account by them."""

from api.inference.stream import Stream
from common.settings.settings import Settings


def prompt_headers(settings: Settings, num_chars: int) -> dict[str, str]:
    """What is known before the first token; `num_chars` of the prompt."""
    known = {"x-compute-type": settings.compute_type} if settings.compute_type else {}
    return known | {"x-compute-characters": str(num_chars)}


def time_headers(stream: Stream, begun_s: float) -> dict[str, str]:
    """Of a finished stream."""
    total_s = stream.ended_s - begun_s
    inference_s = stream.ended_s - stream.placed_s
    milliseconds = {
        "x-total-time": total_s,
        "x-validation-time": stream.begun_s - begun_s,
        "x-queue-time": stream.placed_s - stream.begun_s,
        "x-inference-time": inference_s,
        "x-time-per-token": inference_s / max(1, stream.num_tokens),
    }
    return {name: str(round(1000 * value)) for name, value in milliseconds.items()} | {
        "x-compute-time": f"{total_s:.6f}",
        "x-prompt-tokens": str(len(stream.prompt_ids)),
        "x-generated-tokens": str(stream.num_tokens),
    }
