"""One streamed request, with the times at which its tokens came."""

import time
from dataclasses import dataclass, field
from typing import Any

import httpx
import orjson

from deploy.bench.servers import GENERATE, Server
from deploy.commands.client import (
    ServerError,
    SseDecoder,
    check_status,
    connection_errors,
    error_text,
    frame_errors,
    one_line,
)


@dataclass(slots=True)
class TimedAnswer:
    """An answer, filled in while it is streamed.

    Attributes:
        sent_s, times_s, ended_s: monotonic times of the request, of each frame with tokens, of the end (0:
            it was cut off).
        num_tokens, prompt_tokens: as the server reports them, None where it does not.
        error: why it failed; empty when it did not.
    """

    sent_s: float
    times_s: list[float] = field(default_factory=list)
    ended_s: float = 0.0
    num_tokens: int | None = None
    prompt_tokens: int | None = None
    error: str = ""


def body(server: Server, path: str, prompt: str, max_tokens: int) -> bytes:
    """Return a greedy, streamed request that ignores the end-of-sequence token where the server can."""
    ignore_eos = {"ignore_eos": True} if server.ignores_eos else {}
    if path == GENERATE:
        parameters = {"max_new_tokens": max_tokens, "do_sample": False, "details": True} | ignore_eos
        return orjson.dumps({"inputs": prompt, "parameters": parameters})
    fields = {"model": server.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    return orjson.dumps(fields | {"stream": True, "stream_options": {"include_usage": True}} | ignore_eos)


async def send(client: httpx.AsyncClient, path: str, content: bytes, answer: TimedAnswer) -> None:
    """Send the request, and fill in the answer until it ends. Raises ServerError."""
    headers = {"content-type": "application/json"}
    with connection_errors(str(client.base_url)):
        async with client.stream("POST", path, content=content, headers=headers) as response:
            if response.status_code != httpx.codes.OK:
                check_status(response.status_code, await response.aread())
            frames = SseDecoder()
            async for chunk in response.aiter_raw():
                now_s = time.monotonic()
                for frame in frames.feed(chunk):
                    read_frame(answer, frame, now_s)
    if not (answer.times_s or answer.num_tokens):
        raise ServerError("the server's answer has no token")
    answer.ended_s = time.monotonic()


def read_frame(answer: TimedAnswer, frame: dict[str, Any], now_s: float) -> None:
    """Add one frame, of either route, to the answer."""
    if error := error_text(frame):
        raise ServerError(f"the server ends the answer: {one_line(error)}")
    with frame_errors(frame):
        if has_tokens(frame):
            answer.times_s.append(now_s)
        usage = frame.get("usage") or {}
        details = frame.get("details") or {}
        answer.num_tokens = (
            usage.get("completion_tokens") or details.get("generated_tokens") or answer.num_tokens
        )
        answer.prompt_tokens = (
            usage.get("prompt_tokens") or details.get("input_length") or answer.prompt_tokens
        )


def has_tokens(frame: dict[str, Any]) -> bool:
    """A token may have no text (half a character). A last frame with only a finish reason has
    none.
    """
    choices = frame.get("choices")
    if not choices:
        return "token" in frame
    return bool(choices[0].get("text")) or not choices[0].get("finish_reason")
