"""Streams that run while something is done to the fleet."""

import asyncio
from typing import Any

from benchmarks.client import Stream, stream
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

    def __init__(self, fleet: Fleet, max_new_tokens: int, count: int = NUM_STREAMS) -> None:
        self.max_new_tokens = max_new_tokens
        self.streams = [Stream() for _ in range(count)]
        url = f"{fleet.base_url}/generate_stream"
        self.tasks = [
            asyncio.create_task(stream(url, body(i, max_new_tokens), one))
            for i, one in enumerate(self.streams)
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
            assert one.frames[-1]["generated_text"] == "".join(frame["token"]["text"] for frame in one.frames)
        return [one.ids for one in self.streams]
