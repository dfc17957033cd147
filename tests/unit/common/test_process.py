"""Logs: JSON lines, names of processes and of their lives.
What Linux and the driver show of a machine: cores, memory, GPUs, waits, the matrix unit.
Parent death, as far as tests/integration/deploy/test_launcher.py does not show it.
Every process refuses to start with a setting it cannot serve: one line, which names it.
Ranks, by the variables of what starts them.
"""

import ctypes
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from common.process import machine
from common.process.logs import (
    TRACEPARENT,
    JsonFormatter,
    TextFormatter,
    first_incarnation,
    for_request,
    new_incarnation,
    next_incarnation,
)
from common.process.machine import Gpu, available_bytes, list_gpus, run_delay_s
from common.rank import RankInfo, follows, is_spread, machine_ranks
from common.settings.settings import SettingError, Settings
from tests.support.forks.client import ForkedProcess
from tests.support.machine import fake_nvml
from tests.support.waiting import wait_until_sync

# --- logs ---------------------------------------------------------------------------------------------------


def record(message: str, *args: object, **extra: str) -> logging.LogRecord:
    return logging.getLogger("api.app").makeRecord(
        "api.app", logging.WARNING, "", 0, message, args, None, extra=extra
    )


def test_a_json_line_has_the_fields_of_its_record() -> None:
    line = json.loads(JsonFormatter("g0", "g0-1").format(record('a "word"\nof %d', 2, **for_request("r1"))))
    stamp = datetime.fromisoformat(line.pop("timestamp"))
    assert stamp.tzinfo is not None and abs(stamp.timestamp() - datetime.now().timestamp()) < 60
    assert line == {
        "level": "WARNING",
        "process": "g0",
        "incarnation": "g0-1",
        "host": socket.gethostname(),
        "target": "api.app",
        "message": 'a "word"\nof 2',
        "request_id": "r1",
    }


def test_lines_about_a_traced_request_have_its_trace() -> None:
    trace_id, own, other = "ab" * 16, "cd" * 8, "ef" * 8
    about = record("x", **for_request("r1", f"00-{trace_id}-{other}-01"))
    token = TRACEPARENT.set(f"00-{trace_id}-{own}-01")
    try:
        for line, span_id in ((record("x"), own), (about, other)):
            shown = json.loads(JsonFormatter("g0").format(line))
            assert (shown["trace_id"], shown["span_id"]) == (trace_id, span_id)
            assert TextFormatter("g0").format(line).endswith(f" x trace_id={trace_id}")
    finally:
        TRACEPARENT.reset(token)
    assert "trace_id" not in JsonFormatter("g0").format(record("x"))


def test_every_line_of_a_process_is_json_tracebacks_and_libraries_included() -> None:
    code = """
import logging, warnings
from common.process import logs
logs.set_up("w0", "info", True)
logging.getLogger("uvicorn.error").warning("odd")
logging.debug("not said")
warnings.warn("old")
try:
    1 / 0
except ZeroDivisionError:
    logging.exception("crash")
raise ValueError("the end")
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr
    odd, old, crash, end = (json.loads(line) for line in said.splitlines())
    assert (odd["process"], odd["target"], odd["message"]) == ("w0", "uvicorn.error", "odd")
    assert odd["incarnation"].startswith("w0-")
    assert {old["incarnation"], crash["incarnation"], end["incarnation"]} == {odd["incarnation"]}
    assert "UserWarning: old" in old["message"]
    assert crash["message"] == "crash" and "ZeroDivisionError" in crash["exception"]
    assert end["level"] == "CRITICAL" and "the end" in end["message"] and "ValueError" in end["exception"]


# --- logs incarnations --------------------------------------------------------------------------------------


def test_the_lives_of_a_process_are_numbered_and_no_two_processes_share_a_name() -> None:
    first = new_incarnation("w0")
    assert first != new_incarnation("w0")
    assert next_incarnation(first) == f"{first}.2"
    assert next_incarnation(f"{first}.9") == f"{first}.10"
    assert {first_incarnation(name) for name in (first, f"{first}.2", f"{first}.10")} == {first}


# --- machine cpu --------------------------------------------------------------------------------------------

V1_GROUPS = {"proc/self/cgroup": "3:cpu,cpuacct:/docker/abc\n2:cpuset:/docker/abc\n"}


def v1(quota: int) -> dict[str, str]:
    folder = "sys/fs/cgroup/cpu,cpuacct"
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
        (V1_GROUPS | v1(250_000), 2),  # in a container, which does not see /docker/abc
        (V1_GROUPS | v1(-1), 16),
    ],
)
def test_the_tightest_quota_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(16))
    assert machine.num_cores(write(tmp_path, files)) == cores


# --- machine gpu --------------------------------------------------------------------------------------------


def test_gpus_are_listed_as_the_driver_orders_them_and_none_where_it_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_nvml.install(monkeypatch, "GPU-b", "GPU-a")
    assert [gpu.uuid for gpu in list_gpus()] == ["GPU-b", "GPU-a"]
    assert list_gpus()[0] == Gpu("GPU-b", "NVIDIA H200", fake_nvml.MEMORY_BYTES, "570.1")
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


def v2(group: str, *sizes: int | str) -> dict[str, str]:
    return of_group(f"sys/fs/cgroup{group}/memory", ".max", ".current", "active_file 7\ninactive", *sizes)


def v1_memory(group: str, *sizes: int) -> dict[str, str]:
    folder = f"sys/fs/cgroup/memory{group}/memory"
    return of_group(folder, ".limit_in_bytes", ".usage_in_bytes", "inactive_file 3\ntotal_inactive", *sizes)


def of_group(
    path: str, limit_name: str, used_name: str, stat: str, limit: int | str, used: int | str, cache: int | str
) -> dict[str, str]:
    """The files of a control group: its limit, what it uses, and of that the cache."""
    numbers = {limit_name: f"{limit}", used_name: f"{used}", ".stat": f"{stat}_file {cache}"}
    return {f"{path}{name}": f"{text}\n" for name, text in numbers.items()}


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
        ({"proc/self/cgroup": "0::/\n"} | v2("", 5000 * MIB, 0, 0), 1000),  # larger than the machine
        (V1_MEMORY | v1_memory("", 500 * MIB, 300 * MIB, 50 * MIB), 250),  # it does not see /docker/abc
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


# --- parent death -------------------------------------------------------------------------------------------

BIND = "from common.process.launch import die_with_parent; die_with_parent();"


def run_bound(parent_pid: int) -> int:
    environ = os.environ | {"PARENT_PID": str(parent_pid)}
    return subprocess.run(
        [sys.executable, "-c", BIND + "import os; assert 'PARENT_PID' not in os.environ"], env=environ
    ).returncode


def test_a_parent_that_ended_before_the_call_is_noticed() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert run_bound(gone.pid) == -signal.SIGKILL


def test_a_process_without_a_parent_to_follow_runs_on() -> None:
    assert run_bound(0) == 0
    assert run_bound(os.getpid()) == 0


# --- startup ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", ["api", "batcher", "gpu_worker"])
def test_a_process_without_a_broker_names_the_setting(module: str) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "REDIS_URL"}
    process = ForkedProcess([sys.executable, "-P", "-m", module], env=environ, stderr=subprocess.PIPE)
    _, said = process.communicate()
    assert process.returncode == os.EX_CONFIG and said.startswith(b"tokenfleet: REDIS_URL: is not set"), said


# --- startup refusal ----------------------------------------------------------------------------------------

REFUSED = """
from common.process import logs
from common.process.startup import exit_when_unservable
from common.settings.settings import SettingError, Settings
with exit_when_unservable():
    {before}
    Settings.read([])
"""


def said_by(before: str = "pass") -> str:
    environ = os.environ | {"MAX_BATCH_SIZE": "none"}
    code = REFUSED.format(before=before)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ)
    assert done.returncode == os.EX_CONFIG
    [line] = done.stderr.splitlines()
    return line


def test_a_refused_setting_is_one_line_also_of_the_log_as_json() -> None:
    assert said_by().startswith("tokenfleet: MAX_BATCH_SIZE: ")
    line = json.loads(said_by('logs.set_up("supervisor of w0", "info", as_json=True)'))
    assert line["message"].startswith("MAX_BATCH_SIZE: ")
    assert (line["level"], line["process"]) == ("ERROR", "supervisor of w0") and line["host"]
    assert line["incarnation"].startswith("supervisor of w0-")


# --- rank ---------------------------------------------------------------------------------------------------

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
PLACE = {"MASTER_ADDR": "node0", "MASTER_PORT": "1234"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SLURM = {
    "SLURM_PROCID": "4",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "gpu[07-08,11]",
}


@pytest.mark.parametrize(
    ("environ", "info"),
    [
        ({}, RankInfo()),
        ({"WORLD_SIZE": "1", "RANK": "0"}, RankInfo()),
        (TORCHRUN | PLACE, RankInfo(3, 4, 1, 2, "node0", 1234)),
        (OPEN_MPI, RankInfo(1, 2, 1, 2, "127.0.0.1", 29_500)),
        (MPICH | PLACE, RankInfo(3, 4, 1, 2, "node0", 1234)),
        (SLURM, RankInfo(4, 5, 0, 1, "gpu07", 29_500)),
        (SLURM | PLACE, RankInfo(4, 5, 0, 1, "node0", 1234)),
        ({"RANK": "1", "WORLD_SIZE": "2", **PLACE}, RankInfo(1, 2, 0, 1, "node0", 1234)),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"},
            RankInfo(1, 2, 1, 2, "127.0.0.1", 29_500),
        ),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, RankInfo()),
    ],
)
def test_ranks_by_the_variables_of_their_launcher(environ: dict[str, str], info: RankInfo) -> None:
    assert RankInfo.read(environ) == info
    assert RankInfo.read(info.environ()) == info


@pytest.mark.parametrize(
    ("environ", "line"),
    [
        ({"WORLD_SIZE": "2", **PLACE}, "RANK: RANK and WORLD_SIZE belong together: 'RANK'"),
        (TORCHRUN | {"RANK": "4"} | PLACE, "RANK: 4 of 4 and 1 of 2 of this machine: no such rank"),
        (MPICH, "MASTER_ADDR: is missing: .*mpirun -x MASTER_ADDR=HOST"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "x"}, "OMPI_COMM_WORLD_RANK: .* belong together"),
    ],
)
def test_variables_that_make_no_rank_are_refused_by_name(environ: dict[str, str], line: str) -> None:
    with pytest.raises(SettingError, match=line):
        RankInfo.read(environ)


def test_the_ranks_of_one_machine_meet_at_loopback() -> None:
    ranks = machine_ranks(Settings(), 3)
    assert [(info.rank, info.local_rank, info.address) for info in ranks] == [
        (i, i, "127.0.0.1") for i in range(3)
    ]
    assert all(info.is_local for info in ranks) and machine_ranks(Settings(), 1) == [RankInfo()]


def test_each_of_several_machines_has_as_many_ranks() -> None:
    settings = Settings(nnodes=2, node_rank=1, master_addr="node0")
    assert machine_ranks(settings, 4) == [
        RankInfo(2, 4, 0, 2, "node0", 29_500),
        RankInfo(3, 4, 1, 2, "node0", 29_500),
    ]
    assert is_spread(settings, {}) and follows(settings, {})
    assert not follows(Settings(nnodes=2), {}) and not is_spread(Settings(num_shard=2), {})
    assert follows(Settings(), TORCHRUN | PLACE)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"node_rank": 1}, "NUM_SHARD: 3 ranks are not the same number on each of 2 machines"),
        ({"nnodes": 3, "node_rank": 3}, "NODE_RANK: 3 is not one of 3 .NNODES., counted from 0"),
        ({"nnodes": 3}, "MASTER_ADDR: is missing: with NNODES it is the address of machine 0"),
    ],
)
def test_machines_that_do_not_fit_are_refused_by_name(settings: dict[str, Any], line: str) -> None:
    with pytest.raises(SettingError, match=line):
        machine_ranks(Settings(**{"nnodes": 2, **settings}), 3)
