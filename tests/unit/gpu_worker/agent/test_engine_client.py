"""The engine client, with frames that an engine might send."""

import asyncio
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from common.metrics import catalogue
from gpu_worker.agent.engine_client import EngineClient, EngineDied, EngineRefused, RankProcess
from gpu_worker.protocol import (
    SAMPLE,
    EngineFailure,
    Grant,
    LoadProgress,
    Ready,
    StepResult,
    encode,
)
from tests.support.engine.start_rows import start_row

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
    rank = RankProcess(process, *await asyncio.open_unix_connection(sock=ours))
    with theirs:
        yield FakeEngine(EngineClient([rank]), theirs)
    rank.kill()
    await process.wait()
    rank.writer.close()


def counters() -> list[float]:
    """Tokens, decode steps, prefill steps."""
    steps = [catalogue.BATCH_FORWARD.series[method,] for method in ("decode", "prefill")]
    return [
        catalogue.TOKENS.values[()],
        *(sum(number for bound, number in parts.items() if bound > 0) for parts in steps),
    ]


async def test_steps_that_arrive_together_are_returned_together_and_counted(engine: FakeEngine) -> None:
    before = counters()
    engine.client.send(Grant(5, 64, [start_row(row, [], 4, ignore_eos=True) for row in (1, 2)]))
    engine.send(
        encode(StepResult(1, TWO, prefilled=((1, 7), (2, 7)), duration_ms=5.0)),
        encode(StepResult(2, TWO, duration_ms=2.0)),
        encode(StepResult(2)),
    )
    assert [step.step for step in await engine.client.steps()] == [1, 2, 2]
    engine.send(encode(StepResult(3, TWO, duration_ms=2.0)))
    assert [step.step for step in await engine.client.steps()] == [3]
    assert [now - then for now, then in zip(counters(), before, strict=True)] == [4, 1, 1]


async def test_an_engine_failure_raises_engine_died(engine: FakeEngine) -> None:
    engine.send(encode(StepResult(1, TWO)), encode(EngineFailure("", "out of luck")))
    with pytest.raises(EngineDied, match=r"engine failed: out of luck"):
        await engine.client.steps()


async def test_unreadable_bytes_end_the_engine(engine: FakeEngine) -> None:
    engine.send(encode(StepResult(1)), b"\xc1", encode(StepResult(2)))
    with pytest.raises(EngineDied, match=r"engine failed: not a frame: FormatError"):
        await engine.client.steps()


async def test_the_end_of_its_process_ends_the_engine(engine: FakeEngine) -> None:
    engine.client.kill()
    engine.peer.close()
    with pytest.raises(EngineDied, match=r"the process of rank 0 ended with -9"):
        await engine.client.steps()


async def test_ready_returns_the_capacity_and_passes_progress_on(engine: FakeEngine) -> None:
    progress: list[str] = []
    engine.send(encode(LoadProgress("loading")), encode(LoadProgress("warm")), encode(READY))
    assert await engine.client.ready(progress.append) == READY
    assert (progress, engine.client.token_ms) == (["loading", "warm"], 0.5)
    engine.send(encode(READY))
    with pytest.raises(EngineDied, match="unexpected frame of the engine: Ready"):
        await engine.client.steps()


async def test_a_setting_that_cannot_be_served_raises_engine_refused(engine: FakeEngine) -> None:
    engine.send(encode(EngineFailure("dtype", "float7 is none")))
    with pytest.raises(EngineRefused, match="dtype: float7 is none"):
        await engine.client.ready(print)
