"""A worker whose ranks run on several machines: here processes of their own, in folders of their own."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from common import model_files
from tests.support.engine import tiny_models
from tests.support.fleet.fleet import Fleet
from tests.support.forks.client import ForkedProcess
from tests.support.load import Load
from tests.support.machine.ports import free_port
from tests.support.waiting import wait_until, wait_until_sync

MAX_NEW_TOKENS = 100
STREAMS = 3
VOCAB = 49_152
SETTINGS = {
    "device": "cpu",
    "dtype": "float32",
    "debug_kv": True,
    "kv_cache_bytes": "32MiB",
    "worker_ttl_s": 3,
    "threads": 1,
    "num_shard": 2,
    "nnodes": 2,
    "master_addr": "127.0.0.1",
    "model_id": "tiny",
}


class SecondMachine:
    """`tokenfleet supervise worker` on the machine without rank 0. It knows no broker."""

    def __init__(self, folder: Path, **settings: object) -> None:
        variables = {name.upper(): str(value) for name, value in settings.items()}
        self.errors = folder / "stderr"
        with self.errors.open("w") as errors:
            self.supervisor = ForkedProcess(
                [sys.executable, "-P", "-m", "deploy.cli", "supervise", "worker"],
                env=os.environ | variables | {"NODE_RANK": "1", "PARENT_PID": str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stderr=errors,
                cwd=folder,
            )

    def engine(self) -> psutil.Process:
        """Wait for the process of its rank."""
        return wait_until_sync(lambda: next(self.processes("tokenfleet engine"), None))

    def processes(self, title: str) -> Iterator[psutil.Process]:
        for process in psutil.Process(self.supervisor.pid).children(recursive=True):
            if process.is_running() and " ".join(process.cmdline()).startswith(title):
                yield process

    def kill(self) -> None:
        for process in [*psutil.Process(self.supervisor.pid).children(recursive=True), self.supervisor]:
            process.kill()
        self.supervisor.wait()


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Fleet, SecondMachine]]:
    """Both have the model in a folder of their own, which they call by the same name."""
    folders = [tmp_path_factory.mktemp(f"machine{number}") for number in range(2)]
    tiny_models.save(
        folders[0] / "tiny",
        "Llama",
        tiny_models.LLAMA | {"vocab_size": VOCAB, "max_position_embeddings": 512},
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_files.resolve("smollm2") / name, folders[0] / "tiny")
    shutil.copytree(folders[0] / "tiny", folders[1] / "tiny")
    own = SETTINGS | {"master_port": free_port()}
    second = SecondMachine(folders[1], **own)
    try:
        with Fleet(**own | {"model_id": folders[0] / "tiny"}) as fleet:
            yield fleet, second
    finally:
        print(second.errors.read_text()[-5000:], file=sys.stderr)
        second.kill()


@pytest.mark.parametrize("place", [1, 0])
async def test_a_killed_rank_costs_no_token(machines: tuple[Fleet, SecondMachine], place: int) -> None:
    """Both machines end their part of the worker, and start it again."""
    fleet, second = machines
    expected = await Load(fleet, MAX_NEW_TOKENS, STREAMS).whole()
    worker, ranks = fleet.pid("w0"), [*fleet.engines("w0"), second.engine()]
    load = Load(fleet, MAX_NEW_TOKENS, STREAMS)
    await load.progress(5)
    assert load.running and len(ranks) == 2
    ranks[place].send_signal(signal.SIGKILL)
    await asyncio.to_thread(fleet.restarted, "w0", worker)
    assert await load.whole() == expected
    assert second.engine().pid != ranks[1].pid
    await wait_until(lambda: not any(rank.is_running() for rank in ranks))
