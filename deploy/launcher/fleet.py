"""Local fleet: the processes of a fleet on one machine, their ports, and how far they are preloaded."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from common.messages.kept_answer import WHOLE_FLEET_VARIABLE
from common.process import machine
from common.process.launch import LOAD_FLAG, PRELOAD_FLAG, WEIGHTS_VARIABLE
from common.rank import follows
from common.settings.settings import SettingError, Settings
from common.settings.types import MAX_PORT
from deploy.launcher import prepare
from deploy.launcher.embedded_broker import Broker
from deploy.launcher.preloaded_process import PreloadedProcess, family, resident_bytes
from deploy.launcher.socket_keeper import SocketKeeper
from deploy.launcher.supervised_process import SupervisedProcess

MODULES = {"batcher": "batcher", "worker": "gpu_worker", "gateway": "api", "jobs": "api.jobs.arq_worker"}
KINDS = {"api": "gateway", "batcher": "batcher", "worker": "worker", "jobworker": "jobs"}
"""Words of the command line → kinds of processes."""
RANK_BYTES = 512 * 2**20
"""Memory of an engine's process with torch and transformers, a little more than was measured."""
GATEWAY_BYTES = 128 * 2**20
"""Memory of a gateway."""


@dataclass(slots=True)
class LocalFleet:
    """The processes that `tokenfleet serve` runs; with `tokenfleet supervise` a single one.

    Attributes:
        settings: with the `redis_url` that all processes use.
        brokers: the embedded broker; empty when REDIS_URL leads to another.
        jobs: the job workers.
        was_ready: whether the fleet ever served.
        is_ending: whether the launcher was told to end. A process that then ends with 0 was told, too.
        preloaded: processes that wait to become the next gateway and the next worker.
        keeper: keeps copies of the sockets of answers; closed when the fleet ends.
    """

    settings: Settings
    brokers: list[SupervisedProcess]
    batchers: list[SupervisedProcess]
    workers: list[SupervisedProcess]
    gateways: list[SupervisedProcess]
    jobs: list[SupervisedProcess] = field(default_factory=list)
    was_ready: bool = False
    is_ending: bool = False
    preloaded: Sequence[PreloadedProcess] = ()
    keeper: SocketKeeper = field(default_factory=SocketKeeper)

    @property
    def all(self) -> list[SupervisedProcess]:
        return [*self.brokers, *self.ours]

    @property
    def ours(self) -> list[SupervisedProcess]:
        """All but the broker, in the order of their start."""
        return [*self.batchers, *self.workers, *self.gateways, *self.jobs]

    @property
    def follows(self) -> bool:
        """Whether it has nothing but ranks of a worker whose rank 0 runs on another machine. It has no
        broker, and nobody but that rank knows whether it is ready.
        """
        return bool(self.workers) and follows(self.settings, os.environ)

    @property
    def is_whole(self) -> bool:
        """Whether it can serve by itself."""
        return bool(self.batchers and self.workers and self.gateways)


def command(module: str) -> list[str]:
    """Words that run one of our modules. -P: a folder `api` in the user's current directory is not ours."""
    return [sys.executable, "-P", "-m", module]


def new_fleet(settings: Settings, broker: Broker | None) -> LocalFleet:
    """Make the fleet of `tokenfleet serve`, not started yet. `broker`: the one to start, None where
    `settings.redis_url` leads to another.
    """
    return build_fleet(settings, broker, num_processes(settings))


def num_processes(settings: Settings) -> dict[str, int]:
    """Return how many processes of each kind `tokenfleet serve` starts."""
    return {
        "batcher": settings.num_batchers,
        "worker": settings.num_workers,
        "gateway": settings.num_gateways,
        "jobs": settings.num_jobs,
    }


def build_fleet(settings: Settings, broker: Broker | None, counts: Mapping[str, int]) -> LocalFleet:
    """Make a fleet, not started yet. `counts`: processes of each kind."""
    keeper = SocketKeeper(settings.gateway_grace_s)
    users = {kind: {"REDIS_URL": broker.url_of(kind)} if broker else {} for kind in MODULES}
    environs = {kind: settings.environ() | users[kind] for kind in MODULES}
    pools = [settings.of_pool(pool).environ() | users["batcher"] for pool in settings.pools]
    preloaded: dict[str, PreloadedProcess] = {}
    if settings.preload_gateway is not False:
        preloaded["gateway"] = PreloadedProcess(
            "gateway",
            command(MODULES["gateway"]),
            environs["gateway"],
            lambda: gateway_flags(settings),
            keeper.open_channel,
        )
    if settings.preload_worker is not False:
        preloaded["worker"] = PreloadedProcess(
            "worker",
            command(MODULES["worker"]),
            environs["worker"],
            lambda: worker_flags(settings, worker_bytes(fleet)),
        )

    def members(kind: str) -> list[SupervisedProcess]:
        return [
            SupervisedProcess(
                kind, f"{kind[0]}{number}", command(MODULES[kind]), environs[kind], preloaded.get(kind)
            )
            for number in range(counts.get(kind, 0))
        ]

    fleet = LocalFleet(
        settings=settings,
        brokers=[supervised_broker(broker)] if broker else [],
        batchers=[
            SupervisedProcess("batcher", f"b{number}", command(MODULES["batcher"]), own)
            for number, own in enumerate(pools * counts.get("batcher", 0))
        ],
        workers=members("worker"),
        gateways=members("gateway"),
        jobs=members("jobs"),
        preloaded=[process for kind, process in preloaded.items() if counts.get(kind)],
        keeper=keeper,
    )
    for gateway in fleet.gateways:
        gateway.open_channel = keeper.open_channel
        if fleet.is_whole:
            gateway.environ = gateway.environ | {WHOLE_FLEET_VARIABLE: "1"}
    taken = {settings.port: "PORT"}
    number_ports(fleet.gateways, "GATEWAY_PORT", settings.gateway_port, taken)
    number_ports(fleet.ours, "METRICS_PORT", settings.metrics_port, taken)
    return fleet


@contextlib.contextmanager
def sharing_weights(fleet: LocalFleet) -> Iterator[None]:
    """Give engines on CPU memory for the weights that they share (gpu_worker/engine/cpu/weight_store.py)."""
    on_cpu = fleet.workers and not prepare.caches_on_gpu(fleet.settings)
    if not on_cpu or not hasattr(os, "memfd_create"):
        yield
        return
    handle = os.memfd_create("tokenfleet weights")
    own = {WEIGHTS_VARIABLE: str(handle)}
    for worker in fleet.workers:
        worker.environ = worker.environ | own
    for preloaded in fleet.preloaded:
        preloaded.environ = {**preloaded.environ, **(own if preloaded.kind == "worker" else {})}
    try:
        yield
    finally:
        os.close(handle)


def worker_flags(settings: Settings, worker_bytes: int) -> list[str]:
    """Choose how far a worker is preloaded; empty: not at all.

    It loads its model, too, if the model is on CPU, has one rank, and leaves enough memory. Where memory
    suffices not even for a worker without a model, PRELOAD_WORKER can still demand one. `worker_bytes`:
    memory of a worker that has loaded the model; 0: not known, as on macOS.
    """
    num_ranks = -(-settings.num_ranks // settings.nnodes)
    may_load = num_ranks == settings.nnodes == 1 and not prepare.caches_on_gpu(settings) and worker_bytes > 0
    may_load &= not settings.models  # which of them is needed is not known yet
    if may_load and fits_in_memory(settings, max(worker_bytes, RANK_BYTES)):
        return [PRELOAD_FLAG, LOAD_FLAG]
    return (
        [PRELOAD_FLAG]
        if settings.preload_worker or fits_in_memory(settings, settings.num_ranks * RANK_BYTES)
        else []
    )


def gateway_flags(settings: Settings) -> list[str]:
    """Choose how far a gateway is preloaded; empty: not at all."""
    return [PRELOAD_FLAG] if settings.preload_gateway or fits_in_memory(settings, GATEWAY_BYTES) else []


def fits_in_memory(settings: Settings, process_bytes: int) -> bool:
    """Whether memory has room for twice such a process besides all caches. Caches on CPU count as a whole:
    they take their pages only as they are used.
    """
    caches_bytes = 0 if prepare.caches_on_gpu(settings) else settings.num_workers * settings.cpu_cache_bytes
    return machine.available_bytes() - caches_bytes >= 2 * process_bytes


def worker_bytes(fleet: LocalFleet) -> int:
    """Memory of the largest worker."""
    return max(sum(map(resident_bytes, family(worker.pid))) for worker in fleet.workers)


def supervised_broker(broker: Broker) -> SupervisedProcess:
    return SupervisedProcess("broker", "broker", broker.command(), {}, stop_signal=signal.SIGINT)


def number_ports(
    processes: Sequence[SupervisedProcess], name: str, first: int, taken: dict[int, str]
) -> None:
    """Give each process a port of its own from `first` on; none, if that is 0. Raises SettingError.

    `taken`: port → the setting that has taken it.
    """
    if not first:
        return
    if first + len(processes) - 1 > MAX_PORT:
        raise SettingError(name, f"{first} leaves no room for {len(processes)} ports up to {MAX_PORT}")
    for port, process in enumerate(processes, first):
        if (other := taken.setdefault(port, name)) != name:
            raise SettingError(
                name, f"from {first} on, {len(processes)} are needed, but {port} is for {other}"
            )
        process.environ = process.environ | {name: str(port)}
