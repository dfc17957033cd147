"""A machine shuts down: every process of `tokenfleet serve` gets SIGTERM at once, the broker, too."""

import asyncio
import json
import os
import random
import signal
from collections import Counter

import httpx
import psutil
import pytest

from tests.support.chaos.chaos_fleet import ChaosFleet
from tests.support.fleet.fleet import have_ended, is_of_fleet
from tests.support.waiting import wait_until

NUM_STREAMS, NUM_TOKENS = 8, 100
STEP_MS = 20.0


async def stream(url: str, number: int, seen: Counter[int]) -> list[int]:
    """Indices of all tokens; `seen` counts those of each stream."""
    parameters = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True, "details": True}
    body = {"inputs": f"number {number}", "parameters": parameters}
    async with (
        httpx.AsyncClient(timeout=120) as client,
        client.stream("POST", f"{url}/generate_stream", json=body) as response,
    ):
        indices = []
        async for line in response.aiter_lines():
            if line.startswith("data:"):
                frame = json.loads(line[5:])
                assert "error" not in frame, frame
                indices.append(frame["index"])
                seen[number] += 1
        return indices


@pytest.mark.parametrize("launcher_is", [pytest.param("first", marks=pytest.mark.slow), "last", "late"])
async def test_sigterm_to_every_process_at_once_finishes_streams(launcher_is: str) -> None:
    fleet = ChaosFleet(STEP_MS, num_gateways=2, num_batchers=2, num_workers=2)
    fleet.start()
    try:
        async with fleet.proxy(random.Random(1)):
            await asyncio.to_thread(fleet.ready)
            await shut_down(fleet, launcher_is)
    finally:
        fleet.kill()


async def shut_down(fleet: ChaosFleet, launcher_is: str) -> None:
    seen = Counter[int]()
    streams = [asyncio.create_task(stream(fleet.base_url, i, seen)) for i in range(NUM_STREAMS)]
    await wait_until(lambda: all(seen[i] > 5 for i in range(NUM_STREAMS)))
    # its fork servers stay, which no machine has: a gateway that ends early needs a successor
    everybody = [process for process in fleet.processes() if is_of_fleet(process)]
    assert len(everybody) > 9
    pids = [process.pid for process in everybody]
    gateways = [psutil.Process(pid) for name, pid in fleet.pids().items() if name in ("g0", "g1")]
    for pid in pids if launcher_is == "first" else pids[1:]:
        os.kill(pid, signal.SIGTERM)
    if launcher_is == "late":
        await wait_until(lambda: have_ended(gateways))
    if launcher_is != "first":
        os.kill(pids[0], signal.SIGTERM)
    assert await asyncio.gather(*streams) == [[*range(1, NUM_TOKENS + 1)]] * NUM_STREAMS
    assert await asyncio.to_thread(fleet.launcher.wait, 60) == 0, fleet.errors()
    await wait_until(lambda: have_ended(everybody))
    assert "Traceback" not in fleet.errors()
    assert launcher_is != "first" or "starts again" not in fleet.errors()
