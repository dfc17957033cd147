"""The engine client, with frames that an engine might send."""

import asyncio
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import pytest

from common.settings.settings import SettingError
from gpu_worker.agent.engine_client import EngineClient, EngineDied, EngineLink, RankProcess
from gpu_worker.frames import encode
from gpu_worker.protocol import SAMPLE, EngineFailure, LoadProgress, Ready, StepResult
from tests.support.waiting import wait_until

READY = Ready("m", "float32", "cpu", 16, 100, 64, 2048, b"", token_ms=0.5)
TWO = SAMPLE.pack(1, 0, 5, -0.5) + SAMPLE.pack(2, 0, 6, -0.5)


@dataclass
class FakeEngine:
    """Sends bytes as the engine of `client`, whose process sends nothing itself."""

    client: EngineClient
    peer: socket.socket

    def send(self, *frames: bytes) -> None:
        self.peer.sendall(b"".join(frames))


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    ours, theirs = socket.socketpair()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "input()", stdin=asyncio.subprocess.PIPE
    )
    rank = RankProcess(process, await EngineLink.open(ours))
    with theirs:
        yield FakeEngine(EngineClient([rank]), theirs)
    rank.kill()
    await process.wait()
    rank.link.transport.close()


async def steps_until_death(engine: FakeEngine, why: str) -> list[list[int]]:
    """The numbers of the steps that are handled, by call, until the engine dies for this reason."""
    calls: list[list[int]] = []
    with pytest.raises(EngineDied, match=why):
        await engine.client.run_steps(lambda steps: calls.append([step.step for step in steps]))
    return calls


async def test_steps_that_arrive_together_are_handled_together(engine: FakeEngine) -> None:
    calls: list[list[int]] = []
    engine.send(*(encode(StepResult(number, TWO)) for number in (1, 2, 2)))
    running = asyncio.create_task(
        engine.client.run_steps(lambda steps: calls.append([step.step for step in steps]))
    )
    await wait_until(lambda: calls == [[1, 2, 2]])
    engine.send(encode(StepResult(3, TWO)))
    await wait_until(lambda: calls == [[1, 2, 2], [3]])
    running.cancel()
    await asyncio.wait([running])
    engine.send(encode(StepResult(4)), encode(EngineFailure("", "out of luck")))
    await wait_until(lambda: len(engine.client.ranks[0].link.frames) == 2)
    assert await steps_until_death(engine, "out of luck") == [[4]], "what came meanwhile is kept"


async def test_what_a_handler_raises_ends_the_run(engine: FakeEngine) -> None:
    def fail(steps: Sequence[StepResult]) -> None:
        raise ZeroDivisionError(steps)

    engine.send(encode(StepResult(1)))
    with pytest.raises(ZeroDivisionError):
        await engine.client.run_steps(fail)


async def test_an_engine_failure_raises_engine_died(engine: FakeEngine) -> None:
    engine.send(encode(StepResult(1, TWO)), encode(EngineFailure("", "out of luck")))
    assert await steps_until_death(engine, r"engine failed: out of luck") == [[1]]


async def test_unreadable_bytes_end_the_engine(engine: FakeEngine) -> None:
    engine.send(encode(StepResult(1)), b"\xc1", encode(StepResult(2)))
    assert await steps_until_death(engine, r"engine failed: not a frame: FormatError") == [[1]]


async def test_the_end_of_its_process_ends_the_engine(engine: FakeEngine) -> None:
    engine.client.kill()
    engine.peer.close()
    assert await steps_until_death(engine, r"the process of rank 0 ended with -9") == []


async def test_ready_returns_the_capacity_and_passes_progress_on(engine: FakeEngine) -> None:
    progress: list[str] = []
    engine.send(encode(LoadProgress("loading")), encode(LoadProgress("warm")), encode(READY))
    assert await engine.client.ready(progress.append) == READY
    assert (progress, engine.client.token_ms) == (["loading", "warm"], 0.5)
    engine.send(encode(READY))
    assert await steps_until_death(engine, "unexpected frame of the engine: Ready") == []


async def test_a_setting_that_cannot_be_served_raises_a_setting_error(engine: FakeEngine) -> None:
    engine.send(encode(EngineFailure("dtype", "float7 is none")))
    with pytest.raises(SettingError, match="DTYPE: float7 is none"):
        await engine.client.ready(print)
