"""The engine client with frames that an engine might send, the GPUs that workers claim, and the capacity that
a worker announces.
"""

import asyncio
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from common.messages.plan import WorkerCapacity
from common.settings.settings import SettingError, Settings
from gpu_worker import process as gpus
from gpu_worker.agent.engine_client import EngineClient, EngineDied, RankProcess
from gpu_worker.protocol import SAMPLE, EngineFailure, LoadProgress, StepResult, encode
from gpu_worker.swapping.swapper import capacity
from tests.support.machine import fake_nvml
from tests.support.waiting import wait_until

READY = WorkerCapacity("", "", "m", "float32", 16, 100, 64, 2048, token_ms=0.5)
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
    rank = await RankProcess.open(process, ours)
    with theirs:
        yield FakeEngine(EngineClient([rank]), theirs)
    rank.kill()
    await process.wait()
    rank.transport.close()


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
    await wait_until(lambda: len(engine.client.ranks[0].frames) == 2)
    assert await steps_until_death(engine, "out of luck") == [[4]], "what came meanwhile is kept"


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
    assert progress == ["loading", "warm"]
    engine.send(encode(READY))
    assert await steps_until_death(engine, "unexpected frame of the engine: WorkerCapacity") == []


async def test_a_setting_that_cannot_be_served_raises_a_setting_error(engine: FakeEngine) -> None:
    engine.send(encode(EngineFailure("dtype", "float7 is none")))
    with pytest.raises(SettingError, match="DTYPE: float7 is none"):
        await engine.client.ready(print)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with two GPUs; returns the folder for locks."""
    fake_nvml.install(monkeypatch, "GPU-a", "GPU-b")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path / "locks"


def test_ranks_claim_one_gpu_each_or_none_at_all(machine: Path) -> None:
    settings = Settings(gpu_locks=str(machine))
    with pytest.raises(SettingError, match="NUM_SHARD: 3, but this worker sees 2 GPUs"):
        gpus.claim(settings, 3)
    held = gpus.claim(settings, 1)
    with pytest.raises(SettingError, match="DEVICE: other workers of this machine hold 1 of 2 GPUs"):
        gpus.claim(settings, 2)
    held["GPU-a"].close()
    assert [*gpus.claim(settings, 2)] == ["GPU-a", "GPU-b"]


def test_workers_with_a_part_of_the_memory_share_a_gpu(machine: Path) -> None:
    settings = Settings(gpu_locks=str(machine), cuda_memory_fraction=0.5)
    held = [gpus.claim(settings, count) for count in (1, 2, 1)]
    assert [[*gpus] for gpus in held] == [["GPU-a"], ["GPU-b", "GPU-a"], ["GPU-b"]]
    with pytest.raises(SettingError):
        gpus.claim(settings, 1)


@pytest.mark.parametrize(("visible", "claimed"), [("1", ["GPU-b"]), ("GPU-b,GPU-a", ["GPU-b"]), ("", [])])
def test_only_visible_gpus_are_claimed(
    machine: Path, monkeypatch: pytest.MonkeyPatch, visible: str, claimed: list[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [*gpus.claim(Settings(gpu_locks=str(machine)), 1)] == claimed


def test_a_lock_folder_that_cannot_be_written_is_refused(machine: Path) -> None:
    machine.write_text("a file")
    with pytest.raises(SettingError, match="GPU_LOCKS: "):
        gpus.claim(Settings(gpu_locks=str(machine)), 1)


def test_a_link_in_the_lock_folder_leads_nowhere(machine: Path, tmp_path: Path) -> None:
    """Any user of the machine may have put it there."""
    machine.mkdir()
    (machine / "GPU-a.0").symlink_to(tmp_path / "victim")
    with pytest.raises(SettingError, match=r"GPU_LOCKS: .*GPU-a\.0 cannot be used as a lock"):
        gpus.claim(Settings(gpu_locks=str(machine)), 1)
    assert not (tmp_path / "victim").exists()


def test_num_ranks_follows_num_shard_and_sharded(machine: Path) -> None:
    settings_of_workers: tuple[dict[str, Any], ...] = (
        {},
        {"num_shard": 3},
        {"sharded": True},
        {"sharded": False},
        {"sharded": True, "num_shard": 4, "device": "cpu"},
        {"num_shard": 2, "pipeline_parallel_size": 3},
        {"sharded": True, "pipeline_parallel_size": 2},
    )
    assert [gpus.num_ranks(Settings(**settings)) for settings in settings_of_workers] == [1, 3, 2, 1, 4, 6, 2]
    with pytest.raises(SettingError, match="SHARDED: true, but this worker sees 0 GPUs"):
        gpus.num_ranks(Settings(sharded=True, device="cpu"))
    with pytest.raises(SettingError, match="SHARDED: false and 2 ranks"):
        Settings.read(["--sharded", "false", "--num-shard", "2"], {})


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"max_batch_total_tokens": 15}, "MAX_BATCH_TOTAL_TOKENS: 15 is less than one block of 16 tokens"),
        (
            {"max_total_tokens": 1601},
            "MAX_TOTAL_TOKENS: 1601 is more than the 1600 tokens that context and KV cache allow",
        ),
        (
            {"max_input_tokens": 800, "max_batch_total_tokens": 700},
            "MAX_INPUT_TOKENS: 800 is more than the 687 tokens that",
        ),
        (
            {"max_input_tokens": 1600},  # no room for a new token
            "MAX_INPUT_TOKENS: 1600 is more than the 1599 tokens that",
        ),
    ],
)
def test_limits_above_the_capacity_are_refused(settings: dict[str, Any], line: str) -> None:
    with pytest.raises(SettingError, match=line):
        capacity(Settings(**settings), READY, "w0", "w0-1", Path("m"))


def test_max_batch_total_tokens_bounds_the_capacity() -> None:
    worker = capacity(Settings(max_batch_total_tokens=700), READY, "w0", "w0-1", Path("m"))
    assert (worker.num_blocks, worker.max_total_tokens) == (43, 688)
