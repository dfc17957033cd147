"""`tokenfleet roll`: every process is replaced under streams, and none of them loses or repeats a token.
A spot machine's notice: SIGTERM, some seconds, then it is gone. Nothing is lost, with another worker and
without.
"""

import asyncio
import os
import signal
import subprocess
from collections.abc import Iterator

import pytest
import redis

from benchmarks.client import Stream, stream
from deploy.launcher.embedded_broker import Broker
from tests.support.broker_state import KEYS
from tests.support.chaos.launcher import ChaosFleet
from tests.support.fleet.fleet import Fleet
from tests.support.forks.command import tokenfleet
from tests.support.releases.mixed_pool import expected_ids, mixed_pool
from tests.support.source_tree import ROOT
from tests.support.waiting import wait_until

NUM_STREAMS, NUM_TOKENS = 24, 100
PROMPTS = [f"number {number}, and what follows it" for number in range(NUM_STREAMS)]


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    """Two workers that have room for the streams together, and for those of one of them not beside."""
    with ChaosFleet(20.0, num_workers=2, max_batch_size=NUM_STREAMS // 2) as fleet:
        yield fleet


def incarnations(fleet: Fleet) -> set[str]:
    with redis.Redis.from_url(fleet.redis_url) as client:
        found = [*client.zrange(KEYS.workers, 0, -1), *client.zrange(KEYS.processes, 0, -1)]
        return {name.decode() for name in found}


async def roll(fleet: Fleet, *words: str) -> subprocess.CompletedProcess[bytes]:
    arguments = ("roll", "--pid", str(fleet.launcher.pid), *words)
    return await asyncio.to_thread(tokenfleet, *arguments, environ=os.environ)


async def ask_on(fleet: Fleet, prompt: str, answers: list[Stream], done: asyncio.Event) -> None:
    """Read the same answer again and again, and check it, until all is replaced."""
    body = {"inputs": prompt, "parameters": {"max_new_tokens": NUM_TOKENS}}
    while not done.is_set():
        answers.append(answer := Stream())
        await stream(f"{fleet.base_url}/generate_stream", body, answer)
        assert answer.ids == expected_ids(prompt, NUM_TOKENS)


@pytest.mark.slow
async def test_all_processes_are_replaced_under_streams_with_a_changed_setting(fleet: Fleet) -> None:
    before = incarnations(fleet)
    answers: list[Stream] = []
    done = asyncio.Event()
    async with asyncio.TaskGroup() as clients:
        for prompt in PROMPTS:
            clients.create_task(ask_on(fleet, prompt, answers, done))
        await wait_until(lambda: len(answers) == NUM_STREAMS and all(answer.frames for answer in answers))
        said = await roll(fleet, "--max-batch-size", "16")
        done.set()
    assert said.returncode == 0, said.stderr + fleet.errors()[-3000:].encode()
    replaced = {line.split()[0] for line in said.stdout.decode().splitlines() if line.endswith("replaced")}
    assert {name.split("-")[0] for name in replaced} == {"w0", "w1", "b0", "g0"}
    assert not before & incarnations(fleet)
    with redis.Redis.from_url(fleet.redis_url) as client:
        sizes = {
            client.hget(KEYS.worker(name.decode()), "max_rows") for name in client.zrange(KEYS.workers, 0, -1)
        }
    assert sizes == {b"16"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--port", "1"), "cannot be changed by a roll"),
        (("--max-batch-size", "0"), "MAX_BATCH_SIZE"),
        (("--no-such-flag",), "unknown flag"),
        (("--tokenizer-name", "/nowhere"), "w0 stays: its successor did not start"),
    ],
)
async def test_what_a_roll_cannot_change_is_refused_and_nothing_is_replaced(
    fleet: Fleet, words: tuple[str, ...], problem: str
) -> None:
    before = incarnations(fleet)
    said = await roll(fleet, *words)
    assert said.returncode != 0 and problem in said.stderr.decode()
    assert incarnations(fleet) == before


@pytest.mark.slow
def test_a_process_that_is_no_launcher_is_named() -> None:
    said = tokenfleet("roll", "--pid", "1", environ=os.environ)
    assert said.returncode == os.EX_CONFIG and b"1 is no launcher of this user" in said.stderr


# --- spot notice --------------------------------------------------------------------------------------------

MANY_TOKENS, STEP_MS, LEAVES_AFTER_S = 500, 20, "1"
NOTICED = [f"number {number}, and what follows it" for number in range(6)]


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
        answers = [Stream() for _ in NOTICED]
        async with asyncio.TaskGroup() as clients:
            for prompt, answer in zip(NOTICED, answers, strict=True):
                clients.create_task(pool.ask(prompt, MANY_TOKENS, answer))
            for name in ("w0", "w1"):
                await wait_until(lambda: all(answer.frames for answer in answers))
                await leave(pool.running[name])
            assert any(len(answer.frames) < MANY_TOKENS for answer in answers), "some still run"
            pool.start("worker", "w2", ROOT)
        for prompt, answer in zip(NOTICED, answers, strict=True):
            assert answer.ids == expected_ids(prompt, MANY_TOKENS)
