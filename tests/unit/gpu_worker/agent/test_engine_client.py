"""The agent's end of the door, with words that an engine might say."""

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
class Mouth:
    """Says bytes as the engine of `link`, which is a process that says nothing itself."""

    link: EngineClient
    end: socket.socket

    def say(self, *words: bytes) -> None:
        self.end.sendall(b"".join(words))


@pytest.fixture
async def engine() -> AsyncIterator[Mouth]:
    ours, theirs = socket.socketpair()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "input()", stdin=asyncio.subprocess.PIPE
    )
    rank = RankProcess(process, *await asyncio.open_unix_connection(sock=ours))
    with theirs:
        yield Mouth(EngineClient([rank]), theirs)
    rank.kill()
    await process.wait()
    rank.writer.close()


def counted() -> list[float]:
    """Tokens, steps that decode, and those that prefill."""
    steps = [catalogue.BATCH_FORWARD.series[method,] for method in ("decode", "prefill")]
    return [
        catalogue.TOKENS.values[()],
        *(sum(number for bound, number in parts.items() if bound > 0) for parts in steps),
    ]


async def test_steps_that_came_together_are_taken_together_and_counted(engine: Mouth) -> None:
    before = counted()
    engine.link.send(Grant(5, 64, [start_row(row, [], 4, ignore_eos=True) for row in (1, 2)]))
    engine.say(
        encode(StepResult(1, TWO, prefilled=((1, 7), (2, 7)), duration_ms=5.0)),
        encode(StepResult(2, TWO, duration_ms=2.0)),
        encode(StepResult(2)),
    )
    assert [step.step for step in await engine.link.steps()] == [1, 2, 2]
    engine.say(encode(StepResult(3, TWO, duration_ms=2.0)))
    assert [step.step for step in await engine.link.steps()] == [3]
    assert [now - then for now, then in zip(counted(), before, strict=True)] == [4, 1, 1]


async def test_a_failure_ends_the_engine(engine: Mouth) -> None:
    engine.say(encode(StepResult(1, TWO)), encode(EngineFailure("", "out of luck")))
    with pytest.raises(EngineDied, match=r"engine failed: out of luck"):
        await engine.link.steps()


async def test_what_cannot_be_read_ends_the_engine(engine: Mouth) -> None:
    engine.say(encode(StepResult(1)), b"\xc1", encode(StepResult(2)))
    with pytest.raises(EngineDied, match=r"engine failed: at the door: no frame: FormatError"):
        await engine.link.steps()


async def test_the_end_of_its_process_ends_the_engine(engine: Mouth) -> None:
    engine.link.kill()
    engine.end.close()
    with pytest.raises(EngineDied, match=r"the process of rank 0 ended with -9"):
        await engine.link.steps()


async def test_it_is_ready_when_it_says_so(engine: Mouth) -> None:
    heard: list[str] = []
    engine.say(encode(LoadProgress("loading")), encode(LoadProgress("warm")), encode(READY))
    assert await engine.link.ready(heard.append) == READY
    assert (heard, engine.link.token_ms) == (["loading", "warm"], 0.5)
    engine.say(encode(READY))
    with pytest.raises(EngineDied, match="engine spoke out of turn: Ready"):
        await engine.link.steps()


async def test_a_setting_that_cannot_be_served_is_named(engine: Mouth) -> None:
    engine.say(encode(EngineFailure("dtype", "float7 is none")))
    with pytest.raises(EngineRefused, match="dtype: float7 is none"):
        await engine.link.ready(print)
