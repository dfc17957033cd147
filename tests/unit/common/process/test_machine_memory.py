"""Available memory, read from a tree of files as Linux shows it."""

from pathlib import Path

import pytest

from common.process.machine import available_bytes

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


def v1(group: str, limit: int, used: int, cache: int) -> dict[str, str]:
    folder = f"sys/fs/cgroup/memory{group}"
    stat = f"inactive_file 3\ntotal_inactive_file {cache}\n"
    return {
        f"{folder}/memory.limit_in_bytes": f"{limit}\n",
        f"{folder}/memory.usage_in_bytes": f"{used}\n",
        f"{folder}/memory.stat": stat,
    }


V1_GROUPS = {"proc/self/cgroup": "4:memory:/docker/abc\n1:cpu:/docker/abc\n0::/\n"}


@pytest.mark.parametrize(
    ("files", "mib"),
    [
        ({}, 1000),  # a system without control groups
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
        ({"proc/self/cgroup": "0::/\n"} | v2("", 500 * MIB, 501 * MIB, 0), 0),
        (
            {"proc/self/cgroup": "0::/\n"} | v2("", 5000 * MIB, 0, 0),
            1000,
        ),  # the limit is larger than the machine
        (
            V1_GROUPS | v1("", 500 * MIB, 300 * MIB, 50 * MIB),
            250,
        ),  # in a container, which does not see /docker/abc
        (V1_GROUPS | v1("", UNLIMITED_V1, 600 * MIB, 0) | v1("/docker/abc", 400 * MIB, 300 * MIB, 0), 100),
        (V1_GROUPS | v1("", UNLIMITED_V1, 600 * MIB, 0), 1000),
    ],
)
def test_the_tightest_limit_counts(tmp_path: Path, files: dict[str, str], mib: int) -> None:
    assert available_bytes(write(tmp_path, files)) == mib * MIB


def test_this_machine_has_memory_available() -> None:
    assert available_bytes() > MIB
