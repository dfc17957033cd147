"""Workers of one machine take different GPUs, or say that there is none left."""

import os
import stat
from pathlib import Path

import pytest

from common.settings import SettingError, Settings
from gpu_worker import gpus


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with two GPUs, as its `nvidia-smi` says; returns the folder for locks."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nprintf 'GPU-a\\nGPU-b\\n'\n")
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path / "locks"


def test_each_worker_has_its_own(machine: Path) -> None:
    settings = Settings(gpu_locks=str(machine))
    first, second = gpus.claim(settings), gpus.claim(settings)
    assert first and second and [first[0], second[0]] == ["GPU-a", "GPU-b"]
    with pytest.raises(SettingError, match="DEVICE: all 2 GPUs are held by other workers"):
        gpus.claim(settings)
    first[1].close()  # as the end of its process does
    again = gpus.claim(settings)
    assert again and again[0] == "GPU-a"


def test_halves_of_a_gpu_are_shared(machine: Path) -> None:
    settings = Settings(gpu_locks=str(machine), cuda_memory_fraction=0.5)
    held = [gpus.claim(settings) for _ in range(4)]
    assert [gpu for gpu, _ in filter(None, held)] == ["GPU-a", "GPU-b", "GPU-a", "GPU-b"]
    with pytest.raises(SettingError):
        gpus.claim(settings)


@pytest.mark.parametrize(("chosen", "taken"), [("1", "GPU-b"), ("GPU-b,GPU-a", "GPU-b"), ("", None)])
def test_chosen_gpus_only(machine: Path, monkeypatch: pytest.MonkeyPatch, chosen: str, taken: str | None) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    claimed = gpus.claim(Settings(gpu_locks=str(machine)))
    assert (claimed and claimed[0]) == taken


def test_a_worker_on_the_processor_takes_none(machine: Path) -> None:
    assert gpus.claim(Settings(gpu_locks=str(machine), device="cpu")) is None
