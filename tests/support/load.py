"""Requests over HTTP to a fleet: streams that run while something is done to it, and single answers."""

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx

from benchmarks.client import Stream, stream
from tests.support.answers import post
from tests.support.fleet.fleet import Fleet
from tests.support.waiting import PATIENCE_S, wait_until

NUM_STREAMS = 16


def body(i: int, max_new_tokens: int) -> dict[str, Any]:
    inputs = f"<|im_start|>user\nTell me story number {i} about the sea.<|im_end|>\n<|im_start|>assistant\n"
    return {
        "inputs": inputs,
        "parameters": {"max_new_tokens": max_new_tokens, "ignore_eos": True, "details": True},
    }


class Load:
    """Streams that run while something is killed."""

    def __init__(self, fleet: Fleet, asked: int | Sequence[dict[str, Any]], count: int = NUM_STREAMS) -> None:
        """`asked`: tokens of each answer, or the bodies."""
        bodies = [body(i, asked) for i in range(count)] if isinstance(asked, int) else asked
        self.max_new_tokens: int = bodies[0]["parameters"]["max_new_tokens"]
        self.streams = [Stream() for _ in bodies]
        url = f"{fleet.base_url}/generate_stream"
        self.tasks = [
            asyncio.create_task(stream(url, one, into))
            for one, into in zip(bodies, self.streams, strict=True)
        ]

    @property
    def running(self) -> bool:
        return not all(task.done() for task in self.tasks)

    async def progress(self, tokens: int, timeout_s: float = PATIENCE_S) -> None:
        """Wait until every stream has `tokens` more than now, or has ended."""
        have = [len(one.frames) + tokens for one in self.streams]
        await wait_until(
            lambda: all(
                len(s.frames) >= n or t.done() for s, n, t in zip(self.streams, have, self.tasks, strict=True)
            ),
            timeout_s,
        )

    async def whole(self) -> list[list[int]]:
        """Return the ids of all streams, each checked for being complete."""
        async with asyncio.timeout(120):
            await asyncio.gather(*self.tasks)
        for one in self.streams:
            assert [frame.get("index") for frame in one.frames] == list(range(1, self.max_new_tokens + 1)), (
                one.frames[-1]
            )
            assert one.frames[-1]["details"]["finish_reason"] == "length"
            text = "".join(frame["token"]["text"] for frame in one.frames)
            hides_some = any(frame["token"]["special"] for frame in one.frames)
            assert hides_some or one.frames[-1]["generated_text"] == text
        return [one.ids for one in self.streams]


# --- http calls ---------------------------------------------------------------------------------------------

PROMPT = "Once upon a time there was"


async def generate(http: httpx.AsyncClient, inputs: str = PROMPT, **parameters: Any) -> Any:
    """Return the answer, with `ids` and `reason` beside it."""
    body = {"inputs": inputs, "parameters": {"max_new_tokens": 12, "details": True, **parameters}}
    answer = await post(http, "/generate", body)
    details = answer["details"]
    return answer | {"ids": [token["id"] for token in details["tokens"]], "reason": details["finish_reason"]}


async def timeline(http: httpx.AsyncClient, request: str) -> list[str]:
    """Return what has happened to the request of a key, and to its choices. The batcher writes it a moment
    later.
    """
    answer = (await http.get(f"/fleet/requests/{request.rpartition(':')[2]}")).json()
    return [one["what"] for events in answer.get("timelines", {}).values() for one in events]


async def complete(http: httpx.AsyncClient, **fields: Any) -> list[str]:
    """Return the texts of the choices of a completion."""
    answer = await post(http, "/v1/completions", {"prompt": PROMPT, "max_tokens": 12, **fields})
    return [choice["text"] for choice in answer["choices"]]
