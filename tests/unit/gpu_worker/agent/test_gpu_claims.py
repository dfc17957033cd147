"""Workers of one machine claim different GPUs, or fail when none is left."""

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from common.settings.settings import SettingError, Settings
from gpu_worker.agent import gpu_claims as gpus
from tests.support.machine import fake_nvml


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with two GPUs; returns the folder for locks."""
    fake_nvml.install(monkeypatch, "GPU-a", "GPU-b")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path / "locks"


def test_each_worker_claims_its_own_gpu(machine: Path) -> None:
    settings = Settings(gpu_locks=str(machine))
    first, second = gpus.claim(settings, 1), gpus.claim(settings, 1)
    assert [*first, *second] == ["GPU-a", "GPU-b"]
    with pytest.raises(SettingError, match="DEVICE: other workers of this machine hold 2 of 2 GPUs"):
        gpus.claim(settings, 1)
    first["GPU-a"].close()  # as the end of its process does
    assert [*gpus.claim(settings, 1)] == ["GPU-a"]


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


def test_a_driver_that_fails_has_no_gpus(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    fake_nvml.install(monkeypatch, "GPU-a", fails=True)
    assert gpus.visible_gpus() == []


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


def test_other_users_of_the_machine_may_use_the_same_locks(machine: Path) -> None:
    umask = os.umask(0o077)
    try:
        held = gpus.claim(Settings(gpu_locks=str(machine)), 1)
    finally:
        os.umask(umask)
    assert [*held] == ["GPU-a"]
    assert stat.S_IMODE(machine.stat().st_mode) == 0o1777
    assert stat.S_IMODE((machine / "GPU-a.0").stat().st_mode) == 0o644


def test_a_worker_on_cpu_claims_no_gpu(machine: Path) -> None:
    assert gpus.claim(Settings(gpu_locks=str(machine), device="cpu"), 2) == {}


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
