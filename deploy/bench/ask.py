"""One streamed request, and when its tokens came."""

import time
from dataclasses import dataclass, field
from typing import Any

import httpx
import orjson

from deploy.bench.servers import GENERATE, Server
from deploy.commands.client import Frames, Trouble, check, explained, said, shown, unexpected


@dataclass(slots=True)
class TimedAnswer:
    """Filled while it comes.

    Attributes:
        asked_s, times_s, ended_s: monotonic times of the request, of each frame with tokens, of the end (0:
            it was cut off).
        num_tokens, prompt_tokens: by the server's word; None: it has not said.
        error: why it failed; empty when it did not.
    """

    asked_s: float
    times_s: list[float] = field(default_factory=list)
    ended_s: float = 0.0
    num_tokens: int | None = None
    prompt_tokens: int | None = None
    error: str = ""


def body(server: Server, path: str, prompt: str, max_tokens: int) -> dict[str, Any]:
    """Greedy, streamed; on past the end of the sequence where the server can."""
    on = {"ignore_eos": True} if server.ignores_eos else {}
    if path == GENERATE:
        return {
            "inputs": prompt,
            "parameters": {"max_new_tokens": max_tokens, "do_sample": False, "details": True} | on,
        }
    fields = {"model": server.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    return fields | {"stream": True, "stream_options": {"include_usage": True}} | on


async def ask(client: httpx.AsyncClient, path: str, content: bytes, answer: TimedAnswer) -> None:
    """Fills the answer until it has ended. Raises Trouble."""
    headers = {"content-type": "application/json"}
    with explained(str(client.base_url)):
        async with client.stream("POST", path, content=content, headers=headers) as response:
            if response.status_code != httpx.codes.OK:
                check(response.status_code, await response.aread())
            frames = Frames()
            async for chunk in response.aiter_raw():
                now_s = time.monotonic()
                for frame in frames.feed(chunk):
                    take(answer, frame, now_s)
    if not (answer.times_s or answer.num_tokens):
        raise Trouble("an answer without a single token")
    answer.ended_s = time.monotonic()


def take(answer: TimedAnswer, frame: dict[str, Any], now_s: float) -> None:
    """One frame of either route."""
    if error := said(frame):
        raise Trouble(f"the server ends the answer: {shown(error)}")
    with unexpected(frame):
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
    """A token may have no text (half a character). A last frame that only says why it is the last has
    neither.
    """
    choices = frame.get("choices")
    if not choices:
        return "token" in frame
    return bool(choices[0].get("text")) or not choices[0].get("finish_reason")


def encode(asked: dict[str, Any]) -> bytes:
    return orjson.dumps(asked)
