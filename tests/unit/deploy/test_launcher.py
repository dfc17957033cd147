"""The processes of a fleet: their ports, templates and their copies, what is said of starts, deaths and the
end. Workers that are copies are played by a script that imports nothing.
"""

import asyncio
import contextlib
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import psutil
import pytest
import redis
from redis.asyncio import Redis

from batcher.lease import Lease
from common.broker.heartbeat import Heartbeat
from common.broker.pool_client import PoolClient
from common.process import machine
from common.process.launch import WEIGHTS_VARIABLE
from common.settings.settings import SettingError, Settings
from deploy.launcher import control_socket, launcher, prepare
from deploy.launcher import process as processes
from deploy.launcher.control_socket import OrderFailed, RunningFleet
from deploy.launcher.embedded_broker import PREFIX, Broker, embedded
from deploy.launcher.launcher import (
    LocalFleet,
    Roll,
    can_load,
    describe_wait,
    has_memory,
    is_stopped,
    last_lines,
    new_fleet,
    report_death,
    sharing_weights,
)
from deploy.launcher.process import ENDS_FIRST, Restarts, SupervisedProcess, Template, family, memory_score
from deploy.launcher.template import NICENESS
from tests.support import brokers
from tests.support.broker_state import KEYS
from tests.support.engine import tiny_tokenizers
from tests.support.source_tree import python_path
from tests.support.waiting import wait_until, wait_until_sync

NOBODY = 65_534


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder for temporary files, of a short name."""
    with tempfile.TemporaryDirectory() as name:
        monkeypatch.setattr("tempfile.tempdir", name)
        yield Path(name)


@contextlib.contextmanager
def another_user() -> Iterator[None]:
    """Act as a user who owns nothing."""
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def test_no_other_user_of_this_machine_reaches_the_broker() -> None:
    with brokers.running() as broker:
        [server] = [one for one in psutil.process_iter(["cwd"]) if one.info["cwd"] == str(broker.directory)]
        assert not server.net_connections(kind="inet"), "it listens on a port"
        assert stat.S_IMODE(broker.directory.stat().st_mode) == 0o700
        if os.geteuid() == 0:
            with another_user():
                for path in (broker.directory, broker.directory / "appendonlydir"):
                    with pytest.raises(PermissionError):
                        os.listdir(path)
                with socket.socket(socket.AF_UNIX) as client, pytest.raises(PermissionError):
                    client.connect(str(broker.socket_path))
        assert brokers.answers(broker.url), "its owner does"


def test_directories_of_other_users_are_not_removed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Anybody may make one in a folder for all."""
    abandoned = folder / f"{PREFIX}abandoned"
    abandoned.mkdir()
    os.utime(abandoned, (0, 0))
    monkeypatch.setattr("os.geteuid", lambda: os.getuid() + 1)
    with embedded():
        assert abandoned.exists()


def test_a_folder_whose_name_is_too_long_for_a_socket_is_refused_by_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = folder / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with pytest.raises(SettingError, match=r"^TMPDIR: the embedded broker .*path too long"), embedded():
        pass
    assert not list(deep.iterdir())


def test_the_append_only_file_is_rewritten_before_reading_it_takes_long() -> None:
    """Its first part is a snapshot then, and what was overwritten is gone."""
    least, most = 24 * 2**20, 16 * 2**20
    with embedded() as broker:
        process = brokers.start(broker)
        with redis.Redis.from_url(broker.url) as client:

            def is_short() -> bool:
                """The last rewriting may have begun before most writes: one more, if none goes on."""
                if not client.info("persistence")["aof_rewrite_in_progress"]:
                    client.set("key", bytes(2**20))
                return file_bytes(broker) < most

            for _ in range(least // 2**20):
                client.set("key", bytes(2**20))
            try:
                wait_until_sync(is_short)
            finally:
                process.kill()
                process.wait()


def file_bytes(broker: Broker) -> int:
    with contextlib.suppress(FileNotFoundError):  # just being replaced
        return sum(path.stat().st_size for path in (broker.directory / "appendonlydir").iterdir())
    return sys.maxsize


def test_abandoned_directories_are_removed_at_the_next_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = "import os, signal\nfrom deploy.launcher.embedded_broker import embedded\n"
    killed += "with embedded(): os.kill(os.getpid(), signal.SIGKILL)"
    subprocess.run([sys.executable, "-c", killed], env=os.environ | {"TMPDIR": str(folder)})
    [abandoned] = folder.iterdir()
    fresh = folder / f"{PREFIX}which-is-being-made"
    fresh.mkdir()
    with embedded() as first:
        for directory in (abandoned, first.directory):
            (directory / "data").mkdir()
            os.utime(directory, (0, 0))
        with embedded() as second:
            assert set(folder.iterdir()) == {fresh, first.directory, second.directory}
    assert list(folder.iterdir()) == [fresh]


async def test_directories_of_launchers_are_locked_and_removed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also that of a launcher that was killed, and one whose name is too long for a socket."""

    def started() -> contextlib.AbstractAsyncContextManager[None]:
        return control_socket.listening(RunningFleet(os.getpid(), *[""] * 6), AsyncMock())

    abandoned, deep = folder / f"{control_socket.PREFIX}1-abandoned", folder / ("x" * 100)
    abandoned.mkdir()
    os.utime(abandoned, (0, 0))
    async with started():
        [first] = folder.iterdir()
        os.utime(first, (0, 0))
        monkeypatch.setattr(control_socket, "ask", lambda directory: None)  # as if it were stopped
        async with started():
            assert first in folder.iterdir()
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    async with started():
        assert not list(deep.iterdir())


# --- fleet --------------------------------------------------------------------------------------------------


def test_each_process_gets_its_own_ports() -> None:
    fleet = new_fleet(Settings(num_workers=2, num_gateways=2, metrics_port=9000, gateway_port=8000), None)
    ports = {process.name: process.environ["METRICS_PORT"] for process in fleet.all}
    assert ports == {"b0": "9000", "w0": "9001", "w1": "9002", "g0": "9003", "g1": "9004"}
    assert [process.environ["GATEWAY_PORT"] for process in fleet.gateways] == ["8000", "8001"]


@pytest.mark.parametrize(
    ("ports", "words"),
    [
        ({"metrics_port": 65_534}, "65534 leaves no room for 3 ports up to 65535"),
        ({"metrics_port": 9000, "port": 9001}, "from 9000 on, 3 are needed, but 9001 is for PORT"),
        ({"metrics_port": 8000, "gateway_port": 8002}, "from 8000 on, .* but 8002 is for GATEWAY_PORT"),
    ],
)
def test_ports_that_overlap_or_do_not_exist_are_refused(ports: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError, match=f"METRICS_PORT: {words}"):
        new_fleet(Settings(**ports), None)


# --- what templates load ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("spare_bytes", "has"), [(2000, True), (1999, False)])
def test_memory_must_stay_free_for_a_model(
    spare_bytes: int, has: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As much as the template takes. What the caches of all workers may still take is not free."""
    monkeypatch.setattr(machine, "available_bytes", lambda: 2 * 2**20 + spare_bytes)
    monkeypatch.setattr(launcher, "engine_bytes", lambda _: 1000)
    fleet = new_fleet(Settings(device="cpu", num_workers=2, kv_cache_bytes=2**20), None)
    assert has_memory(fleet, "worker") is has and has_memory(fleet, "gateway")


@pytest.mark.parametrize(
    ("settings", "kind", "can"),
    [
        ({"device": "cpu"}, "worker", True),
        ({"device": "cpu", "num_shard": 2}, "worker", False),
        ({"device": "cuda"}, "worker", False),
        ({"device": "cuda"}, "gateway", True),
    ],
)
def test_ranks_and_gpus_load_for_themselves(settings: dict[str, Any], kind: str, can: bool) -> None:
    assert can_load(Settings(**settings), kind) is can


# --- fleet shared weights -----------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="memory without a name is Linux's")
@pytest.mark.parametrize(("device", "shares"), [("cpu", True), ("cuda", False)])
def test_workers_on_cpu_inherit_the_same_memory(device: Any, shares: bool) -> None:
    fleet = new_fleet(Settings(device=device, num_workers=2, redis_url="redis://localhost"), None)
    with sharing_weights(fleet):
        workers: list[Any] = [*fleet.workers, *(one for one in fleet.templates if one.kind == "worker")]
        handles = {one.environ.get(WEIGHTS_VARIABLE) for one in workers}
        assert len(workers) == 3 and len(handles) == 1 and (handles != {None}) == shares
        assert not any(WEIGHTS_VARIABLE in one.environ for one in [*fleet.gateways, *fleet.batchers])
    for handle in handles - {None}:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(int(handle or -1))


# --- startup ------------------------------------------------------------------------------------------------


@pytest.fixture
def fleet(broker: Broker) -> Iterator[LocalFleet]:
    fleet = new_fleet(Settings(redis_url=broker.url, num_workers=2, preload=False), None)
    for worker in fleet.workers:
        worker.incarnation = f"{worker.name}-1"
    yield fleet


async def test_a_worker_that_says_nothing_for_a_moment_does_what_it_did_last(
    fleet: LocalFleet, redis: Redis
) -> None:
    last: dict[str, str] = {}
    async with PoolClient.connect(fleet.settings) as pool:
        assert await describe_wait(fleet, pool, last) == "w0 w1: starting"
        heartbeat = Heartbeat(pool, "starting", "w0-1", ttl_s=60)
        await heartbeat.send(doing="loading a model")
        assert await describe_wait(fleet, pool, last) == "w0: loading a model, w1: starting"
        await heartbeat.remove()
        assert await describe_wait(fleet, pool, last) == "w0: loading a model, w1: starting"
        await redis.set(pool.keys.worker("w0-1"), "its heartbeat")
        assert await describe_wait(fleet, pool, last) == "w1: starting"


def test_the_command_to_try_has_a_proxys_address_and_the_header_of_a_key_but_not_the_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert "Authorization" not in last_lines(Settings())
    monkeypatch.setenv("PUBLIC_URL", "https://a.io:443")
    said = last_lines(Settings(api_key="secret"))
    assert '-H "Authorization: Bearer $API_KEY"' in said and "secret" not in said
    assert "curl -N https://a.io:443/generate_stream" in said


async def test_a_roll_changes_the_settings_of_each_pool_or_of_none(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {"batcher": 1, "worker": 2}
    fleet = new_fleet(Settings(device="cpu", models=("b=x",), preload=False), None, counts)
    fleet.was_ready = True

    async def roll(*become_ready: bool, **variables: str) -> list[str]:
        monkeypatch.setattr(Roll, "becomes_ready", AsyncMock(side_effect=become_ready))
        order = {"settings": variables}
        await Roll.prepare(fleet, order, lambda process: None, lambda line: None).run()
        return [process.environ["SERVED_MODEL_NAME"] for process in fleet.ours]

    before = [process.environ for process in fleet.ours]
    with pytest.raises(SettingError, match="MODELS: cannot be changed by a roll"):
        await roll(MODELS="c=x")
    with pytest.raises(OrderFailed, match="w1 stays"):
        await roll(True, False, SERVED_MODEL_NAME="m")
    assert all(old.items() <= one.environ.items() for old, one in zip(before, fleet.ours, strict=True))
    own = "m,smollm2"
    assert await roll(*[True] * 4, SERVED_MODEL_NAME="m") == [own, "b", own, own], "MODEL_ID stays a name"


# --- supervised process -------------------------------------------------------------------------------------


def test_the_first_restart_is_immediate_and_the_next_ones_wait_longer() -> None:
    """A long life resets the pause."""
    restarts = Restarts()
    assert [restarts.pause_s(lived_s=0.0) for _ in range(8)] == [0, 0.5, 1, 2, 4, 8, 10, 10]
    assert restarts.pause_s(lived_s=60.0) == 0
    assert [restarts.pause_s(lived_s=0.0) for _ in range(3)] == [0, 0.5, 1]


# --- launcher deaths ----------------------------------------------------------------------------------------


@pytest.fixture
def settings(broker: Broker) -> Settings:
    return Settings(redis_url=broker.url)


async def test_the_lease_of_a_dead_batcher_is_free_at_once(redis: Redis, settings: Settings) -> None:
    """That of another one stays."""
    pool = PoolClient(redis, KEYS)
    dead, other = Lease(pool, "b0-1", 60), Lease(pool, "b1-1", 60)
    await dead.acquire()
    await report_death(settings, "batcher", "b1-1")
    assert await redis.get(KEYS.batcher) == b"b0-1"
    await report_death(settings, "batcher", "b0-1")
    await other.acquire()
    await report_death(settings, "batcher", "b0-1")
    assert await redis.get(KEYS.batcher) == b"b1-1"


async def test_a_dead_gateway_is_marked_until_its_heartbeat_expires(redis: Redis, settings: Settings) -> None:
    """One that has left by itself is not there again."""
    await redis.hset(KEYS.gateway("g0-1"), "streams", "3")  # type: ignore[misc]
    await redis.pexpire(KEYS.gateway("g0-1"), 5000)
    for name in ("g0-1", "g1-1"):
        await report_death(settings, "gateway", name)
    assert await redis.hget(KEYS.gateway("g0-1"), "state") == b"died"  # type: ignore[misc]
    assert await redis.pttl(KEYS.gateway("g0-1")) <= 5000
    assert not await redis.exists(KEYS.gateway("g1-1"))


# --- launcher stopped ---------------------------------------------------------------------------------------

FAMILY = "import subprocess; subprocess.run(['sleep', '600'])"


@pytest.fixture
def parent() -> Iterator[psutil.Process]:
    """A process that has started another."""
    with subprocess.Popen([sys.executable, "-c", FAMILY], start_new_session=True) as process:
        found = psutil.Process(process.pid)
        wait_until_sync(found.children)
        yield found
        os.killpg(process.pid, signal.SIGKILL)


def stops(parent: psutil.Process) -> list[int]:
    return [pid for pid in family(parent.pid) if is_stopped(pid)]


@pytest.mark.parametrize("number", [0, 1])
def test_a_stop_is_found_and_lasts_until_its_process_goes_on(parent: psutil.Process, number: int) -> None:
    victim = [parent, *parent.children()][number]
    assert not stops(parent)
    victim.suspend()
    assert wait_until_sync(lambda: stops(parent)) == [victim.pid]
    victim.resume()
    wait_until_sync(lambda: not stops(parent))


# --- templates ----------------------------------------------------------------------------------------------

FAKE = """
import os, sys, time
from pathlib import Path
def preload(everything):
    while everything and Path(os.environ["LOADS"]).exists():
        time.sleep(0.01)
    return f"{everything}@{os.getpriority(os.PRIO_PROCESS, 0)}"
def main(loaded="alone"):
    told = f"{os.getpid()} {loaded} {os.environ['INCARNATION']} {os.getpriority(os.PRIO_PROCESS, 0)}"
    Path(os.environ["TOLD"]).write_text(told)
    time.sleep(600)
if __name__ == "__main__":
    main()
"""


class Workshop:
    """A template, and a worker `w0` that may be its copy; `loads` is a file that keeps it loading."""

    def __init__(self, directory: Path) -> None:
        self.loads, self.told = directory / "loads", directory / "told"
        script = directory / "fake_worker.py"
        script.write_text(FAKE)
        environ = {"LOADS": str(self.loads), "TOLD": str(self.told), "PYTHONPATH": str(directory)}
        environ["PYTHONPATH"] += os.pathsep + python_path()
        self.template = Template("worker", {"worker": "fake_worker"}, environ)
        self.worker = SupervisedProcess("worker", "w0", [sys.executable, str(script)], environ, self.template)
        self.are_ready = asyncio.Event()
        self.are_ready.set()
        self.are_busy, self.looks_at_requests = False, 0

    async def workers_are_ready(self) -> bool:
        return self.are_ready.is_set()

    async def has_requests(self) -> bool:
        self.looks_at_requests += 1
        return self.are_busy

    @property
    def pid(self) -> int:
        assert self.template.process is not None
        return self.template.process.pid

    async def loaded(self) -> None:
        await wait_until(lambda: self.template.process and title(self.pid).startswith("tokenfleet preloaded"))

    async def start(self) -> list[str]:
        """Start the worker. Returns its process id, what it has loaded and at which priority, its
        incarnation, and its own priority.
        """
        self.told.unlink(missing_ok=True)
        running = asyncio.create_task(self.worker.run_once())
        told = await wait_until(lambda: self.told.exists() and self.told.read_text())
        assert psutil.Process(self.worker.pid).ppid() == os.getpid()
        assert self.worker.pid == os.getpgid(self.worker.pid or 0)
        self.worker.kill()
        assert (await running)[0] == -signal.SIGKILL
        return str(told).split()


@contextlib.asynccontextmanager
async def workshop(directory: Path) -> AsyncIterator[Workshop]:
    """Leaving checks that no process is left."""
    others = set(psutil.Process().children(recursive=True))
    shop = Workshop(directory)
    keeping = asyncio.create_task(
        shop.template.keep_loaded(shop.workers_are_ready, shop.has_requests, lambda: True)
    )
    try:
        yield shop
    finally:
        keeping.cancel()
        await asyncio.wait([keeping])
        await shop.template.end()
        assert not set(psutil.Process().children(recursive=True)) - others


def title(pid: int) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(psutil.Process(pid).cmdline())
    return ""


async def test_each_next_worker_is_a_copy_of_what_the_template_has_loaded(tmp_path: Path) -> None:
    """It loads at a low priority, which copies do not have."""
    own = os.getpriority(os.PRIO_PROCESS, 0)
    async with workshop(tmp_path) as shop:
        await shop.loaded()
        template = shop.pid
        first, second = await shop.start(), await shop.start()
        assert first[0] != second[0] and first[2] != second[2] == shop.worker.incarnation
        assert first[1] == second[1] == f"True@{min(own + NICENESS, 19)}"
        assert first[3] == second[3] == str(own) and shop.pid == template


async def test_the_kernel_ends_a_template_first_and_not_the_worker(tmp_path: Path) -> None:
    async with workshop(tmp_path) as shop:
        await shop.loaded()
        assert score(shop.pid) == ENDS_FIRST
        running = asyncio.create_task(shop.worker.run_once())
        await wait_until(lambda: shop.worker.pid)
        assert score(shop.worker.pid) == memory_score()
        os.kill(shop.pid, signal.SIGKILL)
        await shop.template.end()
        assert shop.worker.pid
        shop.worker.kill()
        await running


def score(pid: int | None) -> int:
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


async def test_a_worker_does_not_wait_for_a_template_that_loads(tmp_path: Path) -> None:
    """Nothing can raise its priority, so a new one that has only imported is faster."""
    async with workshop(tmp_path) as shop:
        shop.loads.touch()
        await wait_until(lambda: shop.template.is_loading and title(shop.pid))
        shop.are_ready.clear()
        assert (await shop.start())[1] == f"False@{os.getpriority(os.PRIO_PROCESS, 0)}"
        shop.loads.unlink()


async def test_requests_that_run_go_first_but_not_forever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "POLL_S", 0.01)
    monkeypatch.setattr(processes, "BUSY_S", 0.05)
    async with workshop(tmp_path) as shop:
        shop.are_busy = True
        await shop.loaded()
        assert shop.looks_at_requests >= 5


async def test_a_template_that_does_not_answer_is_ended_and_a_worker_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "ANSWER_TIMEOUT_S", 0.1)
    async with workshop(tmp_path) as shop:
        await shop.loaded()
        pid = shop.pid
        os.kill(pid, signal.SIGSTOP)
        assert (await shop.start())[1] == "alone"
        assert not psutil.pid_exists(pid)


async def test_a_worker_starts_if_the_template_dies_while_it_is_asked(tmp_path: Path) -> None:
    async with workshop(tmp_path) as shop:
        await shop.loaded()
        pid = shop.pid
        os.kill(pid, signal.SIGSTOP)
        starting = asyncio.create_task(shop.start())
        await wait_until(lambda: processes.ADOPTING)
        os.kill(pid, signal.SIGKILL)
        assert (await starting)[1] == "alone"
        assert (await shop.start())[1].startswith("False"), "of the next template"


async def test_a_worker_starts_if_a_template_cannot_import_it(tmp_path: Path) -> None:
    async with workshop(tmp_path) as shop:
        shop.template.modules = {"worker": "missing_module"}
        assert (await shop.start())[1] == "alone"


# --- prepare ------------------------------------------------------------------------------------------------

GIB = 2**30


def test_caches_of_all_workers_must_fit_in_memory_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "available_bytes", lambda: 3 * GIB)
    monkeypatch.setattr(prepare, "NVIDIA", tmp_path / "nvidiactl")
    prepare.check_memory(Settings(num_workers=3))
    for device in ("cpu", "auto"):
        with pytest.raises(SettingError) as refusal:
            prepare.check_memory(Settings(num_workers=4, device=device))
        words = "1024 MiB for each of 4 (NUM_WORKERS), but only 3072 MiB of memory are available"
        assert str(refusal.value) == f"KV_CACHE_BYTES: {words}"


def test_caches_on_a_gpu_are_not_checked_by_the_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "available_bytes", lambda: 0)
    monkeypatch.setattr(prepare, "NVIDIA", tmp_path)
    for device in ("cuda", "auto"):
        prepare.check_memory(Settings(device=device))
    with pytest.raises(SettingError):
        prepare.check_memory(Settings(device="cpu"))


def test_serve_under_torchrun_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    prepare.check_fleet(Settings())
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SettingError, match="WORLD_SIZE: is set by torchrun"):
        prepare.check_fleet(Settings())


def test_a_fleet_on_several_machines_has_one_worker_and_machine_0() -> None:
    prepare.check_fleet(Settings(nnodes=2, num_shard=2))
    with pytest.raises(
        SettingError, match="NODE_RANK: 1: a fleet runs on machine 0; start `tokenfleet worker` here"
    ):
        prepare.check_fleet(Settings(nnodes=2, num_shard=2, node_rank=1))
    with pytest.raises(SettingError, match="NUM_WORKERS: 2, but only one worker may run on several machines"):
        prepare.check_fleet(Settings(nnodes=2, num_shard=2, num_workers=2))


def test_the_tokenizer_is_found_and_must_fit_the_model(tmp_path: Path) -> None:
    model, tokenizer = tmp_path / "model", tmp_path / "tokenizer"
    for folder in (model, tokenizer):
        folder.mkdir()
    tiny_tokenizers.byte_level(tokenizer)
    settings = Settings(model_id=str(model), tokenizer_name=str(tokenizer / "tokenizer.json"))
    (model / "config.json").write_text('{"vocab_size": 605}')
    found = prepare.with_model(settings)
    assert (found.model_id, found.tokenizer_name) == (str(model), str(tokenizer))
    (model / "config.json").write_text('{"text_config": {"vocab_size": 604}}')
    with pytest.raises(SettingError) as refusal:
        prepare.with_model(settings)
    words = "its tokenizer has ids up to 604, and the model's embedding only 604 ids"
    assert str(refusal.value) == f"TOKENIZER_NAME: is not served: {words}"
    (model / "config.json").write_text("{}")
    with pytest.raises(SettingError, match=r"^TOKENIZER_NAME: .*config.json has no vocab_size"):
        prepare.with_model(settings)
    (tokenizer / "tokenizer.json").write_text("{")
    with pytest.raises(SettingError, match=r"^TOKENIZER_NAME: .*tokenizer.json is no tokenizer, or damaged"):
        prepare.with_model(settings)


def test_limits_beyond_the_context_are_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    tiny_tokenizers.byte_level(tmp_path)
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 64}')
    known: dict[str, Any] = {"model_id": str(tmp_path)}
    prepare.with_model(Settings(**known, max_total_tokens=64, max_input_tokens=63))
    prepare.with_model(Settings(**known, max_total_tokens=128, rope_factor=2))
    with pytest.raises(SettingError) as refusal:
        prepare.with_model(Settings(**known, max_total_tokens=65))
    assert str(refusal.value) == "MAX_TOTAL_TOKENS: 65 is more than the 64 tokens of the model's context"
    with pytest.raises(SettingError, match="MAX_INPUT_TOKENS: 64 is more than the 63 tokens of the model's"):
        prepare.with_model(Settings(**known, max_input_tokens=64))


@pytest.mark.parametrize(
    ("settings", "warns"),
    [
        ({}, True),
        ({"hostname": "::"}, True),
        ({"hostname": "my-machine"}, True),
        ({"api_key": "secret"}, False),
        ({"hostname": "127.0.0.1"}, False),
        ({"hostname": "localhost"}, False),
    ],
)
def test_a_fleet_for_everybody_without_a_key_is_a_warning(
    settings: dict[str, Any], warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    prepare.say_access(Settings(**settings))
    warnings = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert bool(warnings) == warns
    assert not warns or "set API_KEY, or HOSTNAME=127.0.0.1" in warnings[0]
