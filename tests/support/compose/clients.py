"""Clients of a compose stack: a stream for each prompt through its proxy, while something is done to it."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import httpx
import pytest

from benchmarks.client import EventReader, Stream, StreamBroken, stream
from tests.support.compose.stack import Stack
from tests.support.waiting import wait_until

PROMPTS = ["The sky is blue because", "Once upon a time", "The history of bread"]
NUM_TOKENS, DISTURBED_AT = 250, 40
PARAMETERS = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True, "details": True}
SETTLED_S = 600

Answer = list[tuple[int, str]]
"""Index and text of every token."""
T = TypeVar("T")


class Clients:
    """Clients, one for each prompt. `streams`: those of the last run."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.url = f"http://127.0.0.1:{stack.variables['PORT']}"
        self.streams: list[Stream] = []

    @property
    def num_tokens(self) -> int:
        return sum(len(one.frames) for one in self.streams)

    @property
    def longest_pause_s(self) -> float:
        """Between two tokens of a stream of the last run."""
        return max(gap_s for one in self.streams for gap_s in one.gaps_s)

    async def stream(self, prompt: str) -> Answer:
        """Return the tokens of a stream that ended well."""
        self.streams.append(one := Stream())
        await stream(f"{self.url}/generate_stream", {"inputs": prompt, "parameters": PARAMETERS}, one)
        assert one.frames[-1].get("generated_text") is not None, one.frames[-1]
        return [(frame["index"], frame["token"]["text"]) for frame in one.frames]

    async def run(self, disturb: Callable[[], object] = lambda: None) -> list[Answer]:
        """Return an answer to each prompt; call `disturb` when each has had some tokens."""
        return await self.all(self.stream, disturb)

    async def run_throughout(self, action: Callable[[], object]) -> list[list[Answer]]:
        """Ask each prompt again and again while the action lasts. Return the answers of each."""
        done = threading.Event()

        def act() -> None:
            action()
            done.set()

        async def repeat(prompt: str) -> list[Answer]:
            answers = [await self.stream(prompt)]
            while not done.is_set():
                answers.append(await self.stream(prompt))
            return answers

        return await self.all(repeat, act)

    async def come_back(self, cut: Callable[[], object]) -> Answer:
        """Return the answer to the first prompt. `cut` breaks its stream off, then the rest is fetched."""
        reader = EventReader(self.url)
        body = {"inputs": PROMPTS[0], "parameters": PARAMETERS, "resume_s": SETTLED_S}
        frames = reader.post("/generate_stream", body)
        found = [await anext(frames) for _ in range(DISTURBED_AT)]
        await asyncio.to_thread(cut)
        with pytest.raises((StreamBroken, ConnectionError)):
            while True:
                found.append(await anext(frames))
        await self.wait_for_workers()
        found += [frame async for frame in reader.go_on()]
        return [(frame["index"], frame["token"]["text"]) for frame in found]

    async def all(self, one: Callable[[str], Awaitable[T]], disturb: Callable[[], object]) -> list[T]:
        self.streams = []
        running = [asyncio.ensure_future(one(prompt)) for prompt in PROMPTS]
        await wait_until(
            lambda: self.num_tokens >= DISTURBED_AT * len(PROMPTS) or any(one.done() for one in running)
        )
        await asyncio.to_thread(disturb)
        return await asyncio.gather(*running)

    async def missed_after_s(self, died_at_s: float) -> list[float]:
        """Return the seconds until the batcher knew of a worker's death, for each stream of the last run that
        the worker held. All containers have the same clock.
        """
        names = [one.place.split("/")[2] for one in self.streams]
        told = [event for name in names for event in await timeline(self.stack, name)]
        return [event["at_ms"] / 1000 - died_at_s for event in told if event["what"] == "died"]

    async def is_healthy(self) -> bool:
        try:
            async with httpx.AsyncClient() as client:
                return (await client.get(f"{self.url}/health", timeout=3)).status_code == 200
        except httpx.HTTPError:
            return False

    async def num_workers(self) -> int:
        processes = (await asyncio.to_thread(self.stack.ask_gateway, "/fleet"))["processes"]
        return sum(one["kind"] == "worker" and one["state"] == "ready" for one in processes)

    async def wait_for_workers(self, num_workers: int = 1) -> None:
        """Wait until this many workers serve."""

        async def are_serving() -> bool:
            return await self.is_healthy() and await self.num_workers() >= num_workers

        await wait_until(are_serving, SETTLED_S)


async def timeline(stack: Stack, request_id: str) -> list[dict[str, Any]]:
    """Return the events of a request that has ended."""

    async def whole() -> list[dict[str, Any]]:
        answer = await asyncio.to_thread(stack.ask_gateway, f"/fleet/requests/{request_id}")
        events: list[dict[str, Any]] = answer.get("timelines", {}).get(request_id, [])
        return events if events and events[-1]["what"] == "ended" else []

    return list(await wait_until(whole))
