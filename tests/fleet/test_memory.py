"""The memory of a fleet that serves requests of every kind does not grow: `-s` prints what each process has.

ENDURANCE_S is for how long they come: 1200 shows more than the default does.
"""

import asyncio
import os
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import httpx
import psutil
import pytest

from tests.support.fleet.fleet import Fleet
from tests.support.waiting import PATIENCE_S

ENDURANCE_S = float(os.environ.get("ENDURANCE_S", "180"))
NUM_CLIENTS = 12
MIN_LOOKS = 20
LOOK_S = 1.0
MAX_GROWTH = 1.02
SLACK_BYTES = 2**22
"""What a small process may grow by, for which two per cent are only a few pages."""
WORDS = "the sea a ship tells how winds and old songs of night came home".split()


def request(draw: random.Random) -> dict[str, Any]:
    """Return a chat of any length, greedy or sampled, with one more option: a new grammar, log-probabilities,
    several choices, or penalties.
    """
    content = " ".join(draw.choices(WORDS, k=draw.randint(3, 300)))
    more: list[dict[str, Any]] = [
        {},
        {"structured_outputs": {"regex": f"[a-z]{{4,9}} {draw.randrange(10**9)}"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema(draw)}}},
        {"logprobs": True, "top_logprobs": 3},
        {"n": 2},
        {"frequency_penalty": 0.5, "logit_bias": {"17": -100}},
    ]
    return {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": draw.randint(4, 48),
        "temperature": draw.choice((0.0, 0.8)),
        "seed": draw.randrange(1000),
        "stream": True,
        **draw.choice(more),
    }


def schema(draw: random.Random) -> dict[str, Any]:
    name = f"k{draw.randrange(10**9)}"
    return {"type": "object", "properties": {name: {"type": "string", "pattern": f"^[a-f]{{2}}{name}$"}}}


async def serve_clients(http: httpx.AsyncClient, draw: random.Random, end_s: float) -> int:
    """Send one request after another, and give up one in eight while it is answered. Returns their number."""
    count = 0
    while time.monotonic() < end_s:
        leaves_after = draw.randint(0, 8) if draw.random() < 1 / 8 else None
        async with http.stream("POST", "/v1/chat/completions", json=request(draw)) as response:
            assert response.status_code == 200, (await response.aread()).decode()
            lines = 0
            async for _ in response.aiter_lines():
                lines += 1
                if lines == leaves_after:
                    break
        count += 1
    return count


def processes(fleet: Fleet) -> list[psutil.Process]:
    """Return all processes without broker and launcher, but with engines, when none of them just ends."""
    found: list[psutil.Process] = []
    for name, pid in fleet.pids().items():
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            found += [] if name == "broker" else [process, *process.children(recursive=True)]
    return found


async def watch(fleet: Fleet, end_s: float) -> Mapping[str, list[int]]:
    """Record the resident bytes of each process every second, by its title."""
    found: defaultdict[str, list[int]] = defaultdict(list)
    while time.monotonic() < end_s:
        for process in await asyncio.to_thread(processes, fleet):
            with suppress(psutil.Error, IndexError):
                found[" ".join(process.cmdline()[0].split()[1:3])].append(process.memory_info().rss)
        await asyncio.sleep(LOOK_S)
    return found


@pytest.mark.slow
async def test_the_memory_of_processes_that_serve_does_not_grow() -> None:
    draw = random.Random(1)
    async with (
        Fleet(num_workers=1, num_gateways=1, kv_cache_bytes="64MiB") as fleet,
        httpx.AsyncClient(base_url=fleet.base_url, timeout=PATIENCE_S, trust_env=False) as http,
    ):
        end_s = time.monotonic() + ENDURANCE_S
        clients = [serve_clients(http, random.Random(draw.random()), end_s) for _ in range(NUM_CLIENTS)]
        memory, counts = await asyncio.gather(watch(fleet, end_s), asyncio.gather(*clients))
    grown = {}
    for name, sizes in memory.items():
        if len(sizes) < MIN_LOOKS:  # it began near the end, or has ended
            continue
        quarters = [statistics.median(part) for part in quarters_of(sizes)]
        print(f"{name:24}", *(f"{size / 2**20:8.1f} MiB" for size in quarters), f"{len(sizes)} looks")
        if quarters[-1] > max(MAX_GROWTH * quarters[-2], quarters[-2] + SLACK_BYTES):
            grown[name] = quarters
    print(f"{sum(counts)} requests in {ENDURANCE_S:.0f} s")
    assert "engine w0" in memory and not grown


def quarters_of(sizes: list[int]) -> list[list[int]]:
    size = len(sizes) // 4
    return [sizes[i * size : (i + 1) * size] for i in range(4)]
