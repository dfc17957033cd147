"""Cores that a process may use: a container's quota counts, read from a tree of files as Linux shows it."""

import os
from pathlib import Path

import pytest

from common.process import machine

V1_GROUPS = {"proc/self/cgroup": "3:cpu,cpuacct:/docker/abc\n2:cpuset:/docker/abc\n"}


def v1(group: str, quota: int) -> dict[str, str]:
    folder = f"sys/fs/cgroup/cpu,cpuacct{group}"
    return {f"{folder}/cpu.cfs_quota_us": f"{quota}\n", f"{folder}/cpu.cfs_period_us": "100000\n"}


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 16),  # a system without control groups
        ({"proc/self/cgroup": "0::/\n"}, 16),  # the topmost group of a machine has no quota
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, 16),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "350000 100000\n"}, 3),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
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


def test_this_machine_has_a_core() -> None:
    assert machine.num_cores() >= 1
