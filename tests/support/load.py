"""Streams that run while something is done to the fleet."""

import asyncio
import os
import signal
from typing import Any

from benchmarks.client import Stream, stream
from tests.support.fleet.fleet import Fleet, have_ended
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

    async def cut(self) -> list[list[int]]:
        """Return the ids that streams have so far, and end the streams; none of them has ended by itself."""
        assert not any(task.done() for task in self.tasks)
        for task in self.tasks:
            task.cancel()
        await asyncio.wait(self.tasks)
        for one in self.streams:
            assert [frame.get("index") for frame in one.frames] == list(range(1, len(one.frames) + 1))
        return [one.ids for one in self.streams]


async def kill_both_workers(fleet: Fleet, load: Load) -> None:
    """Kill the agent of w0, then the engine of w1, each when all streams have eight more tokens. Returns when
    both workers have successors.
    """
    for name in ("w0", "w1"):
        await load.progress(8)
        old = fleet.pid(name)
        os.kill(old if name == "w0" else fleet.engines(name)[0].pid, signal.SIGKILL)
        await asyncio.to_thread(fleet.restarted, name, old)


async def interrupt_worker(
    fleet: Fleet, number: int, sent: int, max_new_tokens: int, count: int
) -> list[list[int]]:
    """Send a signal to one process of w0, a worker of two ranks (0 is its agent, others are ranks), under
    streams. Returns their ids when all are whole, and no process of that incarnation is left.
    """
    await wait_until(lambda: fleet.workers_ready() == fleet.settings["num_workers"])
    pid, ranks = fleet.pid("w0"), fleet.engines("w0")
    assert len(ranks) == 2
    load = Load(fleet, max_new_tokens, count)
    await load.progress(5)
    assert load.running
    os.kill([pid, *(rank.pid for rank in ranks)][number], sent)
    await asyncio.to_thread(fleet.restarted, "w0", pid)
    await wait_until(lambda: have_ended(ranks))
    return await load.whole()
