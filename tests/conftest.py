import gc
import os
import resource
import ssl
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from redis.asyncio import Redis
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

import tests.support.machine.ports
from common.broker.client import connect
from common.process import machine
from deploy.launcher.embedded_broker import Broker
from gpu_worker.engine.process import SPIN_COUNT
from tests.support import brokers, caches
from tests.support.fleet.fleet import Fleet
from tests.support.forks import client as forks
from tests.support.waiting import PATIENCE_S

os.environ.setdefault(*SPIN_COUNT)  # before anything imports torch
# hundreds of processes import the same modules: they are compiled once, whatever the environment says
sys.dont_write_bytecode = False
os.environ["PYTHONDONTWRITEBYTECODE"] = ""
# hundreds of clients speak to servers without TLS: none reads a file of all certificates, which takes 20 ms
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = ssl.get_default_verify_paths().openssl_capath

# a busy machine may keep one example from its core for seconds: no time limit says anything of the code
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
TEST_PORTS = range(10_000, 20_000)
NUM_PORTS = len(TEST_PORTS) // WORKERS
tests.support.machine.ports.PORTS = TEST_PORTS[WORKER * NUM_PORTS : (WORKER + 1) * NUM_PORTS]
"""Ports that no other pytest process or launcher of the same run chooses."""
Fleet.start_process = forks.ForkedProcess
FLEETS = ("clients", "fleet/two_workers", "fleet")
LOADED = ("tests/unit/gpu_worker/engine", "tests/unit/gpu_worker/engine/sampling")
BUDGETS_S = {"unit/gpu_worker": 130, "unit": 85, "integration": 130, "fleet": 60, "repo": 30}
DEFAULT_MARKS = "not slow and not gpu"
LONG = ("unit/gpu_worker", "unit/batcher", "unit/common", "integration", "repo")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Start two processes more than there are cores: tests wait about half of their time."""
    return machine.num_cores() + 2


def pytest_xdist_setupnodes() -> None:
    caches.fill_in_background()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest modules first, so that no process is left alone with one at the end. Modules that
    compute and modules that wait are mixed by the names of their files.
    """
    tests = Path(__file__).parent

    def place(item: pytest.Item) -> tuple[int, str]:
        path = item.path.relative_to(tests).as_posix()
        for rank, room in enumerate(FLEETS):
            if path.startswith(room):
                return rank, ""
        return (len(FLEETS), item.path.name) if path.startswith(LONG) else (len(FLEETS) + 1, "")

    items.sort(key=place)


def processor_s() -> float:
    """Seconds that this process and all processes it waited for have computed."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime


class Budgets:
    """Processor seconds of each folder of tests, shown beside their budgets after a whole run.

    They are those of an idle machine with two cores; the machine decides, so they fail nothing.
    """

    def __init__(self) -> None:
        self.counted_s = processor_s()
        self.used_s: defaultdict[str, float] = defaultdict(float)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> None:
        """Fixtures that end with a module count for its last test."""
        if call.when == "teardown":
            before_s, self.counted_s = self.counted_s, processor_s()
            item.user_properties.append(("processor_s", self.counted_s - before_s))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count in the process that hears of all tests."""
        if report.when == "teardown":
            folder = next((one for one in BUDGETS_S if report.nodeid.startswith(f"tests/{one}/")), "others")
            seconds = dict(report.user_properties)["processor_s"]
            self.used_s[folder] += float(str(seconds))

    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter, config: pytest.Config
    ) -> None:
        is_whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS and not config.option.keyword
        if not is_whole or config.option.markexpr != DEFAULT_MARKS:
            return
        terminalreporter.section("processor seconds (budget)")
        for folder, used_s in self.used_s.items():
            budget_s = BUDGETS_S.get(folder, 0)
            mark = " over its budget" if used_s > budget_s else ""
            terminalreporter.line(f"{used_s:7.0f} ({budget_s}) tests/{folder}{mark}")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Budgets())


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exempt what is collected and imported from garbage collection: it stays for the whole run."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session")
def shared_broker() -> Iterator[Broker]:
    forks.server()
    with brokers.running() as broker:
        yield broker


@pytest.fixture
def broker(shared_broker: Broker) -> Broker:
    """A running broker (`broker.url`) without keys; all tests share its server."""
    brokers.empty(shared_broker)
    return shared_broker


@pytest.fixture
async def redis(broker: Broker) -> AsyncIterator[Redis]:
    """A client of the broker, as processes make theirs, but with longer time-outs."""
    async with connect(broker.url, socket_connect_timeout=PATIENCE_S) as client:
        yield client


@pytest.fixture(scope="session")
def loaded() -> Any:
    """An engine with the real model in float32; freed blocks are NaN. It has no rows between two tests."""
    from common.settings.settings import Settings
    from gpu_worker.engine.engine import Engine  # seconds, which most tests need not wait

    return Engine(
        Settings(dtype="float32", kv_cache_bytes=256 * 2**20, max_batch_prefill_tokens=256, debug_kv=True)
    )


@pytest.fixture(scope="module", params=["kernels", pytest.param("torch", marks=pytest.mark.slow)])
def each_sampler(request: pytest.FixtureRequest) -> Iterator[None]:
    """Samples with the native kernels; then with torch, as where there is no compiler, which gives the same
    ids (test_sampler.py).
    """
    from gpu_worker.engine.cpu import native
    from gpu_worker.engine.sampling import sampler

    if request.param == "kernels" and native.library() is None:
        assert not machine.find_compiler(), "the kernels do not compile"
        pytest.skip("no C++ compiler")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr(sampler, "kernels", lambda logits: None)
        yield


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium; where there is none, its tests are skipped."""
    from tests.support.page.scripted_gateway import CHROMIUM, browsing  # most tests need no playwright

    if CHROMIUM is None:
        pytest.skip("no Chromium on PATH")
    with browsing() as browser:
        yield browser


@pytest.fixture
def engine(request: pytest.FixtureRequest, loaded: Any) -> Any:
    """The engine, which reads a step before it launches the next; with AHEAD as on a device that computes by
    itself.
    """
    loaded.runs_ahead = getattr(request, "param", False)
    return loaded


class FolderScheduling(LoadScopeScheduling):  # type: ignore[misc]
    """Schedules a module as a whole on one process. So is a folder of tests/fleet, whose modules share a
    fleet, and the folders whose modules share the engine `loaded`.
    """

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.split("::")[0]
        folder = path.rpartition("/")[0]
        if folder in LOADED:
            return LOADED[0]
        return folder if folder.startswith(("tests/fleet/", "tests/clients")) else path


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> FolderScheduling:
    return FolderScheduling(config, log)
