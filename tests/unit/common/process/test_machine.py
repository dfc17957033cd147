"""What Linux and the driver show of a machine: cores, memory, GPUs, waits, the matrix unit."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.process import machine
from common.process.machine import Gpu, available_bytes, list_gpus, run_delay_s
from tests.support.machine import fake_nvml
from tests.support.waiting import wait_until_sync

# --- machine cpu --------------------------------------------------------------------------------------------

V1_GROUPS = {"proc/self/cgroup": "3:cpu,cpuacct:/docker/abc\n2:cpuset:/docker/abc\n"}


def v1(group: str, quota: int) -> dict[str, str]:
    folder = f"sys/fs/cgroup/cpu,cpuacct{group}"
    return {f"{folder}/cpu.cfs_quota_us": f"{quota}\n", f"{folder}/cpu.cfs_period_us": "100000\n"}


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"proc/self/cgroup": "0::/\n"}, 16),  # the topmost group of a machine has no quota
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "350000 100000\n"}, 3),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "6400000 100000\n"}, 16),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/cpu.max": "200000 100000\n",
                "sys/fs/cgroup/a/b/cpu.max": "400000 100000\n",
            },
            2,
        ),
        (V1_GROUPS | v1("", 250_000), 2),  # in a container, which does not see /docker/abc
        (V1_GROUPS | v1("", -1), 16),
    ],
)
def test_the_tightest_quota_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(16))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert machine.num_cores(tmp_path) == cores


# --- machine gpu --------------------------------------------------------------------------------------------


def test_gpus_are_listed_as_the_driver_orders_them(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvml.install(monkeypatch, "GPU-b", "GPU-a")
    assert [gpu.uuid for gpu in list_gpus()] == ["GPU-b", "GPU-a"]
    assert list_gpus()[0] == Gpu("GPU-b", "NVIDIA H200", fake_nvml.MEMORY_BYTES, "570.1")


def test_a_driver_that_fails_has_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvml.install(monkeypatch, "GPU-a", fails=True)
    assert list_gpus() == []


# --- machine memory -----------------------------------------------------------------------------------------

MIB = 2**20
UNLIMITED_V1 = 9223372036854771712


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in ({"proc/meminfo": "MemTotal: 9999999 kB\nMemAvailable: 1024000 kB\n"} | files).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def v2(group: str, limit: int | str, used: int, cache: int) -> dict[str, str]:
    folder = f"sys/fs/cgroup{group}"
    stat = f"anon 5\nactive_file 7\ninactive_file {cache}\n"
    return {
        f"{folder}/memory.max": f"{limit}\n",
        f"{folder}/memory.current": f"{used}\n",
        f"{folder}/memory.stat": stat,
    }


def v1_memory(group: str, limit: int, used: int, cache: int) -> dict[str, str]:
    folder = f"sys/fs/cgroup/memory{group}"
    stat = f"inactive_file 3\ntotal_inactive_file {cache}\n"
    return {
        f"{folder}/memory.limit_in_bytes": f"{limit}\n",
        f"{folder}/memory.usage_in_bytes": f"{used}\n",
        f"{folder}/memory.stat": stat,
    }


V1_MEMORY = {"proc/self/cgroup": "4:memory:/docker/abc\n1:cpu:/docker/abc\n0::/\n"}


@pytest.mark.parametrize(
    ("files", "mib"),
    [
        ({"proc/self/cgroup": "0::/\n"}, 1000),  # the topmost group of a machine has no limit
        ({"proc/self/cgroup": "0::/\n"} | v2("", 500 * MIB, 300 * MIB, 50 * MIB), 250),  # in a container
        (
            {"proc/self/cgroup": "0::/a/b\n"}
            | v2("/a", 500 * MIB, 100 * MIB, 0)
            | v2("/a/b", "max", 90 * MIB, 0),
            400,
        ),
        (
            {"proc/self/cgroup": "0::/a/b\n"}
            | v2("/a", 500 * MIB, 100 * MIB, 0)
            | v2("/a/b", 120 * MIB, 90 * MIB, 0),
            30,
        ),
        (
            {"proc/self/cgroup": "0::/\n"} | v2("", 5000 * MIB, 0, 0),
            1000,
        ),  # the limit is larger than the machine
        (
            V1_MEMORY | v1_memory("", 500 * MIB, 300 * MIB, 50 * MIB),
            250,
        ),  # in a container, which does not see /docker/abc
        (
            V1_MEMORY
            | v1_memory("", UNLIMITED_V1, 600 * MIB, 0)
            | v1_memory("/docker/abc", 400 * MIB, 300 * MIB, 0),
            100,
        ),
    ],
)
def test_the_tightest_limit_counts(tmp_path: Path, files: dict[str, str], mib: int) -> None:
    assert available_bytes(write(tmp_path, files)) == mib * MIB


# --- machine run delay --------------------------------------------------------------------------------------

BUSY = "import os\nos.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\nwhile True: pass"


def test_a_process_that_shares_its_core_waits_for_it() -> None:
    processes = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(3)]
    try:
        wait_until_sync(lambda: run_delay_s(processes[0].pid) > 0.2)
    finally:
        for process in processes:
            process.kill()
            process.wait()


# --- machine tiles ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("answer", "permits"), [(0, True), (-1, False)])
def test_linux_decides(answer: int, permits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    class Library:
        def __init__(self, name: None) -> None:
            pass

        def syscall(self, *arguments: int) -> int:
            calls.append(arguments)
            return answer

    monkeypatch.setattr(machine, "features", lambda: "amx_bf16 amx_tile")
    monkeypatch.setattr(ctypes, "CDLL", Library)
    assert machine.permits_tiles.__wrapped__() is permits
    assert calls == [(158, 0x1023, 18)]
