"""Clients of a compose stack: a stream for each prompt through its proxy, while something is done to it."""

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import httpx
import pytest

from benchmarks.client import EventReader, StreamBroken
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
    """Clients, one for each prompt.

    Attributes:
        num_tokens: that came in the last run.
        request_ids: of its streams.
        pauses_s: between two of a stream.
    """

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.url = f"http://127.0.0.1:{stack.variables['PORT']}"
        self.num_tokens = 0
        self.request_ids: list[str] = []
        self.pauses_s: list[float] = []

    async def stream(self, client: httpx.AsyncClient, prompt: str) -> Answer:
        """Return the tokens of a stream that ended well."""
        body = {"inputs": prompt, "parameters": PARAMETERS}
        tokens: Answer = []
        last_s, ended = 0.0, False
        async with client.stream("POST", f"{self.url}/generate_stream", json=body) as response:
            assert response.status_code == 200, await response.aread()
            self.request_ids.append(response.headers["x-request-id"])
            async for line in response.aiter_lines():
                if not line.startswith("data:"):
                    continue
                frame = json.loads(line[5:])
                assert "error" not in frame, frame
                now_s = time.monotonic()
                if tokens:
                    self.pauses_s.append(now_s - last_s)
                last_s = now_s
                tokens.append((frame["index"], frame["token"]["text"]))
                ended = frame["generated_text"] is not None
                self.num_tokens += 1
        assert ended, f"cut after {len(tokens)} tokens"
        return tokens

    async def run(self, disturb: Callable[[], object] = lambda: None) -> list[Answer]:
        """Return an answer to each prompt; call `disturb` when each has had some tokens."""
        return await self.all(self.stream, disturb)

    async def run_throughout(self, action: Callable[[], object]) -> list[list[Answer]]:
        """Ask each prompt again and again while the action lasts. Return the answers of each."""
        done = threading.Event()

        def act() -> None:
            action()
            done.set()

        async def repeat(client: httpx.AsyncClient, prompt: str) -> list[Answer]:
            answers = [await self.stream(client, prompt)]
            while not done.is_set():
                answers.append(await self.stream(client, prompt))
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

    async def all(
        self, one: Callable[[httpx.AsyncClient, str], Awaitable[T]], disturb: Callable[[], object]
    ) -> list[T]:
        self.num_tokens, self.request_ids, self.pauses_s = 0, [], []
        async with httpx.AsyncClient(timeout=180) as client:
            running = [asyncio.ensure_future(one(client, prompt)) for prompt in PROMPTS]
            await wait_until(
                lambda: self.num_tokens >= DISTURBED_AT * len(PROMPTS) or any(one.done() for one in running)
            )
            await asyncio.to_thread(disturb)
            return await asyncio.gather(*running)

    async def missed_after_s(self, died_at_s: float) -> list[float]:
        """Return the seconds until the batcher knew of a worker's death, for each stream of the last run that
        the worker held. All containers have the same clock.
        """
        told = [event for name in self.request_ids for event in await timeline(self.stack, name)]
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
