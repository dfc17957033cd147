"""The processes that make a fleet on one machine.

Preload flags: how far a process is prepared before it has its place, by the memory that is left.
"""

import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from common.messages.kept_answer import WHOLE_FLEET_VARIABLE
from common.process import machine
from common.process.preload import LOAD_FLAG, PRELOAD_FLAG
from common.settings.settings import SettingError, Settings
from common.settings.types import MAX_PORT
from deploy.launcher import checks
from deploy.launcher.embedded_broker import Broker
from deploy.launcher.preloaded_process import PreloadedProcess, family, resident_bytes
from deploy.launcher.socket_keeper import SocketKeeper
from deploy.launcher.supervised_process import SupervisedProcess

RANK_BYTES = 512 * 2**20
"""What an engine's process with torch and transformers takes, a little more than was measured."""
GATEWAY_BYTES = 128 * 2**20


def worker_flags(settings: Settings, worker_bytes: int) -> list[str]:
    """How a worker is preloaded: with its model, where that is on CPU and of one rank and leaves memory, or
    without; not at all where even that does not, unless PRELOAD_WORKER demands it. `worker_bytes`: what a
    worker takes that has loaded the model; 0 where nobody knows, as on macOS.
    """
    num_ranks = settings.num_shard or 1
    may_load = num_ranks == 1 and not checks.caches_on_gpu(settings) and worker_bytes > 0
    if may_load and fits_in_memory(settings, max(worker_bytes, RANK_BYTES)):
        return [PRELOAD_FLAG, LOAD_FLAG]
    return (
        [PRELOAD_FLAG] if settings.preload_worker or fits_in_memory(settings, num_ranks * RANK_BYTES) else []
    )


def gateway_flags(settings: Settings) -> list[str]:
    """How a gateway is preloaded, if it is to be."""
    return [PRELOAD_FLAG] if settings.preload_gateway or fits_in_memory(settings, GATEWAY_BYTES) else []


def fits_in_memory(settings: Settings, taken_bytes: int) -> bool:
    """Whether so much leaves memory for all caches, and as much again. Caches on CPU take their pages as they
    are used.
    """
    caches_bytes = 0 if checks.caches_on_gpu(settings) else settings.num_workers * settings.cpu_cache_bytes
    return machine.available_bytes() - caches_bytes >= 2 * taken_bytes


MODULES = {"batcher": "batcher", "worker": "gpu_worker", "gateway": "api", "jobs": "api.jobs.arq_worker"}
KINDS = {"api": "gateway", "batcher": "batcher", "worker": "worker", "jobs": "jobs"}
"""Words of the command line → kinds of processes."""


@dataclass(slots=True)
class LocalFleet:
    """What `tokenfleet serve` runs, or `tokenfleet supervise`: one process.

    Attributes:
        settings: with the `redis_url` that all processes use.
        jobs: the job workers.
        brokers: the embedded broker, or nothing when the broker is not ours.
        was_ready: whether the fleet ever served.
        is_ending: whether it was told to end; who ends by itself then has been told, too.
        preloaded: become the next gateway and the next worker that start, where that is wanted.
        keeper: of the sockets of answers; closed when the fleet ends.
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
    def is_whole(self) -> bool:
        """Whether it can serve by itself."""
        return bool(self.batchers and self.workers and self.gateways)


def command(module: str) -> list[str]:
    """Words that run one of our modules; -P because a folder `api` where the user stands is none of ours."""
    return [sys.executable, "-P", "-m", module]


def new_fleet(settings: Settings, broker: Broker | None) -> LocalFleet:
    """A fleet not yet started. `broker` is the one to start, None where `settings.redis_url` leads to
    another.
    """
    counts = {
        "batcher": settings.num_batchers,
        "worker": settings.num_workers,
        "gateway": settings.num_gateways,
        "jobs": settings.num_jobs,
    }
    return build_fleet(settings, broker, counts)


def build_fleet(settings: Settings, broker: Broker | None, counts: Mapping[str, int]) -> LocalFleet:
    """A fleet not yet started, with so many processes of each kind."""
    environ, keeper = settings.environ(), SocketKeeper(settings.gateway_grace_s)
    preloaded: dict[str, PreloadedProcess] = {}
    if settings.preload_gateway is not False:
        preloaded["gateway"] = PreloadedProcess(
            "gateway",
            command(MODULES["gateway"]),
            environ,
            lambda: gateway_flags(settings),
            keeper.open_channel,
        )
    if settings.preload_worker is not False:
        preloaded["worker"] = PreloadedProcess(
            "worker", command(MODULES["worker"]), environ, lambda: worker_flags(settings, worker_bytes(fleet))
        )

    def members(kind: str) -> list[SupervisedProcess]:
        return [
            SupervisedProcess(
                kind, f"{kind[0]}{number}", command(MODULES[kind]), environ, preloaded.get(kind)
            )
            for number in range(counts.get(kind, 0))
        ]

    fleet = LocalFleet(
        settings=settings,
        brokers=[supervised_broker(broker)] if broker else [],
        batchers=members("batcher"),
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


def worker_bytes(fleet: LocalFleet) -> int:
    """Memory that the largest worker takes."""
    return max(sum(map(resident_bytes, family(worker.pid))) for worker in fleet.workers)


def supervised_broker(broker: Broker) -> SupervisedProcess:
    return SupervisedProcess("broker", "broker", broker.command(), {}, stop_signal=signal.SIGINT)


def number_ports(
    processes: Sequence[SupervisedProcess], name: str, first: int, taken: dict[int, str]
) -> None:
    """Give each process a port of its own, from `first` on, where that is not 0. Raises SettingError."""
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
