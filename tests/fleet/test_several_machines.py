"""A worker whose ranks run on several machines: here processes of their own, in folders of their own, and in
the slow tests in network namespaces of their own.
"""

import asyncio
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import psutil
import pytest

from benchmarks.client import stream
from deploy.launcher.embedded_broker import Broker
from tests.support.engine import tiny_models
from tests.support.engine.reference import prompt_ids, reference_ids
from tests.support.fleet.batchers import batcher
from tests.support.fleet.fleet import READY_S, Fleet, have_ended, is_alive
from tests.support.fleet.gateways import GatewayProcesses, healthy
from tests.support.forks.client import ForkedProcess
from tests.support.load import Load
from tests.support.machine.ports import free_port
from tests.support.prompts import FEW, PROMPTS
from tests.support.waiting import wait_until, wait_until_sync

OURS, THEIRS = "10.77.0.1", "10.77.0.2"


class Machine:
    """Processes that one command starts on a machine: the command itself, and what it starts.

    Attributes:
        errors: the file of what they log.
    """

    def __init__(self, command: Sequence[str], folder: Path, **settings: Any) -> None:
        variables = {name.upper(): str(value) for name, value in settings.items()}
        self.errors = folder / "stderr"
        with self.errors.open("w") as errors:
            self.command = ForkedProcess(
                command,
                env=os.environ | variables | {"PARENT_PID": str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                cwd=folder,
            )

    def engine(self) -> psutil.Process:
        """Wait for the first process of a rank."""
        found: psutil.Process = wait_until_sync(lambda: next(self.titled("tokenfleet engine"), None))
        return found

    def titled(self, title: str) -> Iterator[psutil.Process]:
        for process in psutil.Process(self.command.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):  # it has just ended
                if " ".join(process.cmdline()).startswith(title):
                    yield process

    def log(self) -> str:
        return self.errors.read_text()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            print(f"{' '.join(self.command.args)}:\n{self.log()[-5000:]}", file=sys.stderr)  # type: ignore[arg-type]
        children: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(self.command.pid).children(recursive=True)
        self.command.kill()
        self.command.wait()
        for process in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def tokenfleet(*words: str) -> list[str]:
    return [sys.executable, "-P", "-m", "deploy.cli", *words]


class Link:
    """A network namespace beside this process's own, and the cable between the two.

    Attributes:
        name: of the namespace; words before a command run it there.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.inside = ["ip", "netns", "exec", name]

    def __enter__(self) -> Self:
        run("ip", "netns", "add", self.name)
        run("ip", "link", "add", f"{self.name}a", "type", "veth", "peer", "name", f"{self.name}b")
        run("ip", "link", "set", f"{self.name}b", "netns", self.name)
        run("ip", "addr", "add", f"{OURS}/24", "dev", f"{self.name}a")
        run("ip", "link", "set", f"{self.name}a", "up")
        run(*self.inside, "ip", "addr", "add", f"{THEIRS}/24", "dev", f"{self.name}b")
        run(*self.inside, "ip", "link", "set", "lo", "up")
        self.heal()
        return self

    def __exit__(self, *_: object) -> None:
        run("ip", "link", "del", f"{self.name}a")
        run("ip", "netns", "del", self.name)

    def cut(self) -> None:
        """Lose all that is sent from now on; neither side is told."""
        run(*self.inside, "ip", "link", "set", f"{self.name}b", "down")

    def heal(self) -> None:
        run(*self.inside, "ip", "link", "set", f"{self.name}b", "up")


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, timeout=30)


def can_make_links() -> bool:
    """Whether this process may make network namespaces."""
    try:
        run("ip", "netns", "add", probe := f"probe{os.getpid()}")
        run("ip", "netns", "del", probe)
    except (OSError, subprocess.SubprocessError):
        return False
    return True


MAX_NEW_TOKENS = 100
NEW_TOKENS = 24
STREAMS = 3
VOCAB = 49_152
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "debug_kv": True,
    "kv_cache_bytes": "32MiB",
    "worker_ttl_s": 3,
    "threads": 1,
    "num_shard": 2,
}
TINY = SETTINGS | {"model_id": "tiny", "nnodes": 2, "master_addr": "127.0.0.1"}
FOLLOW = tokenfleet("supervise", "worker", "--node-rank", "1")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A folder for each machine, with a tiny model that both call by the same name."""
    folders = [tmp_path_factory.mktemp(f"machine{number}") for number in range(2)]
    sizes = tiny_models.LLAMA | {"vocab_size": VOCAB, "max_position_embeddings": 512}
    tiny_models.save_with_tokenizer(folders[0] / "tiny", "Llama", sizes)
    shutil.copytree(folders[0] / "tiny", folders[1] / "tiny")
    return folders


@pytest.fixture(scope="module")
def machines(folders: list[Path]) -> Iterator[tuple[Fleet, Machine]]:
    own = TINY | {"master_port": free_port()}
    with (
        Machine(FOLLOW, folders[1], **own) as second,
        Fleet(**own | {"model_id": folders[0] / "tiny"}) as fleet,
    ):
        yield fleet, second


@pytest.mark.slow
@pytest.mark.parametrize("place", [1, 0])
async def test_a_killed_rank_costs_no_token(machines: tuple[Fleet, Machine], place: int) -> None:
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
    await wait_until(lambda: have_ended(ranks))


@contextlib.contextmanager
def serving(broker: Broker) -> Iterator[GatewayProcesses]:
    """A batcher and a gateway without a worker."""
    with batcher(broker.url), GatewayProcesses(broker.url, 1) as gateways:
        yield gateways


async def generate(gateways: GatewayProcesses) -> list[list[int]]:
    """The ids of a few prompts, once a worker serves."""
    await wait_until(lambda: healthy(gateways.url), READY_S)
    bodies = [
        {"inputs": PROMPTS[place], "parameters": {"max_new_tokens": NEW_TOKENS, "details": True}}
        for place in FEW
    ]
    answers = await asyncio.gather(*(stream(f"{gateways.url}/generate_stream", body) for body in bodies))
    return [answer.ids for answer in answers]


def expected_ids() -> list[list[int]]:
    return reference_ids(prompt_ids([PROMPTS[place] for place in FEW]), NEW_TOKENS)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("mpirun"), reason="needs Open MPI (apt-get install openmpi-bin)")
async def test_mpirun_starts_the_ranks(broker: Broker, tmp_path: Path) -> None:
    """A model by its name; SIGTERM ends both ranks in order."""
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", *tokenfleet("worker")]
    own = SETTINGS | {"redis_url": broker.url, "kv_cache_bytes": "128MiB", "master_port": free_port()}
    with serving(broker) as gateways, Machine(command, tmp_path, **own) as ranks:
        assert await generate(gateways) == expected_ids()
        engines = [*ranks.titled("tokenfleet engine")]
        assert len(engines) == 2
        ranks.command.send_signal(signal.SIGTERM)
        await wait_until(lambda: have_ended(engines))


@pytest.mark.slow
async def test_torchrun_starts_ranks_on_two_machines_again(broker: Broker, tmp_path: Path) -> None:
    """A model by its name."""
    own = SETTINGS | {"redis_url": broker.url, "kv_cache_bytes": "128MiB"}
    place = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    torchrun = [sys.executable, "-m", "torch.distributed.run", *place, "--max-restarts", "9"]
    with contextlib.ExitStack() as running:
        gateways = running.enter_context(serving(broker))
        nodes = []
        for number in range(2):
            (tmp_path / str(number)).mkdir()
            command = [*torchrun, "--node-rank", str(number), "-m", "deploy.cli", "worker"]
            nodes.append(running.enter_context(Machine(command, tmp_path / str(number), **own)))
        assert await generate(gateways) == expected_ids()
        engines = [node.engine() for node in nodes]
        engines[1].kill()
        await wait_until(lambda: have_ended(engines))
        assert await generate(gateways) == expected_ids()
        assert all(is_alive(node.engine()) for node in nodes)


@pytest.mark.slow
@pytest.mark.skipif(not can_make_links(), reason="needs the right to make network namespaces")
async def test_a_cut_link_ends_both_sides_until_it_heals(folders: list[Path]) -> None:
    """No side is told of the cut. Each names the other, starts again, and waits; streams then go on."""
    own = TINY | {"master_port": free_port(), "master_addr": OURS}
    with contextlib.ExitStack() as running:
        link = running.enter_context(Link(f"tf{os.getpid()}"))
        second = running.enter_context(Machine([*link.inside, *FOLLOW], folders[1], **own))
        fleet = running.enter_context(Fleet(**own | {"model_id": folders[0] / "tiny"}))
        expected = await Load(fleet, MAX_NEW_TOKENS, STREAMS).whole()
        ranks = [*fleet.engines("w0"), second.engine()]
        load = Load(fleet, MAX_NEW_TOKENS, STREAMS)
        await load.progress(5)
        link.cut()
        await wait_until(lambda: have_ended(ranks))
        lost = re.compile(r"rank \d on .* \((.*)\) is lost: ")
        await wait_until(lambda: THEIRS in lost.findall(fleet.errors()))
        await wait_until(lambda: OURS in lost.findall(second.log()))
        link.heal()
        assert await load.whole() == expected
