"""A spot machine's notice: SIGTERM, some seconds, then it is gone. Nothing is lost, with another worker and
without.
"""

import asyncio
import signal
import subprocess

import pytest

from benchmarks.client import Stream
from deploy.launcher.embedded_broker import Broker
from tests.support.releases.mixed_pool import expected_ids, mixed_pool
from tests.support.source_tree import ROOT
from tests.support.waiting import wait_until

NUM_TOKENS, STEP_MS, LEAVES_AFTER_S = 500, 20, "1"
PROMPTS = [f"number {number}, and what follows it" for number in range(6)]


async def leave(process: subprocess.Popen[bytes]) -> None:
    """Give a worker its notice, and wait until it has left."""
    process.send_signal(signal.SIGTERM)
    await wait_until(lambda: process.poll() is not None)
    assert process.returncode == 0


@pytest.mark.slow  # five processes that nothing has forked
async def test_streams_outlive_the_notices_of_all_workers(broker: Broker) -> None:
    """The rows of the first worker go on at the second. The second is the last: it goes on until its time is
    over, then its rows wait for the third.
    """
    async with mixed_pool(broker.url, "spot", STEP_MS) as pool:
        pool.start("batcher", "b0", ROOT)
        pool.start("gateway", "g0", ROOT)
        for name in ("w0", "w1"):
            pool.start("worker", name, ROOT, GRACEFUL_TERMINATION_TIMEOUT=LEAVES_AFTER_S)
        await pool.ready(num_workers=2)
        answers = [Stream() for _ in PROMPTS]
        async with asyncio.TaskGroup() as clients:
            for prompt, answer in zip(PROMPTS, answers, strict=True):
                clients.create_task(pool.ask(prompt, NUM_TOKENS, answer))
            for name in ("w0", "w1"):
                await wait_until(lambda: all(answer.frames for answer in answers))
                await leave(pool.running[name])
            assert any(len(answer.frames) < NUM_TOKENS for answer in answers), "some still run"
            pool.start("worker", "w2", ROOT)
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            assert answer.ids == expected_ids(prompt, NUM_TOKENS)
