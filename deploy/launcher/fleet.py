"""Local fleet: the processes of a fleet on one machine, from the start, until it is ready, to the end.

A first signal drains the fleet, a second one ends it at once.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from common.broker.client import ERRORS, broker_url
from common.broker.pool_client import PoolClient
from common.messages.kept_answer import WHOLE_FLEET_VARIABLE
from common.process import machine
from common.process.event_loop import run_until_one_ends
from common.process.launch import LOAD_FLAG, PRELOAD_FLAG, WEIGHTS_VARIABLE
from common.process.logs import first_incarnation
from common.rank import follows
from common.settings.settings import SettingError, Settings
from common.settings.types import MAX_PORT
from deploy.launcher import prepare
from deploy.launcher.broker_check import check_broker
from deploy.launcher.embedded_broker import Broker
from deploy.launcher.process import PreloadedProcess, SupervisedProcess, family, resident_bytes, stop
from deploy.launcher.socket_keeper import SocketKeeper

KEPT_S = 30.0
"""How long connections that a gateway has left wait for another one."""

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


def num_processes(settings: Settings) -> dict[str, int]:
    """Return how many processes of each kind `tokenfleet serve` starts."""
    return {
        "batcher": settings.num_batchers,
        "worker": settings.num_workers,
        "gateway": settings.num_gateways,
        "jobs": settings.num_jobs,
    }


def new_fleet(
    settings: Settings, broker: Broker | None, counts: Mapping[str, int] | None = None
) -> LocalFleet:
    """Make a fleet, not started yet.

    Args:
        broker: the one to start; None where `settings.redis_url` leads to another.
        counts: processes of each kind; None: those of `tokenfleet serve`.
    """
    counts = num_processes(settings) if counts is None else counts
    keeper = SocketKeeper(KEPT_S)
    users = {kind: {"REDIS_URL": broker.url_of(kind)} if broker else {} for kind in MODULES}
    environs = {kind: settings.environ() | users[kind] for kind in MODULES}
    pools = [settings.of_pool(pool).environ() | users["batcher"] for pool in settings.pools]
    preloaded: dict[str, PreloadedProcess] = {}
    for kind in ("gateway", "worker") if settings.preload is not False else ():
        preloaded[kind] = PreloadedProcess(
            kind,
            command(MODULES[kind]),
            environs[kind],
            partial(lambda kind: preload_flags(settings, kind, worker_bytes(fleet)), kind),
            keeper.open_channel if kind == "gateway" else None,
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


def preload_flags(settings: Settings, kind: str, worker_bytes: int = 0) -> list[str]:
    """Choose how far a process is preloaded; empty: not at all. Where memory does not suffice even for one
    without a model, PRELOAD can still demand one.

    A worker loads its model, too, if the model is on CPU, has one rank, and leaves enough memory.

    Args:
        worker_bytes: memory of a worker that has loaded the model; 0: not known, as on macOS.
    """
    on_gpu, is_worker = prepare.caches_on_gpu(settings), kind == "worker"
    caches_bytes = 0 if on_gpu else settings.num_workers * settings.cpu_cache_bytes
    half_bytes = (machine.available_bytes() - caches_bytes) // 2  # caches take pages only as they are used
    num_ranks = -(-settings.num_ranks // settings.nnodes)
    may_load = num_ranks == settings.nnodes == 1 and not on_gpu and worker_bytes > 0
    may_load &= is_worker and not settings.models  # which of them is needed is not known yet
    if may_load and max(worker_bytes, RANK_BYTES) <= half_bytes:
        return [PRELOAD_FLAG, LOAD_FLAG]
    wanted_bytes = settings.num_ranks * RANK_BYTES if is_worker else GATEWAY_BYTES
    return [PRELOAD_FLAG] if settings.preload or wanted_bytes <= half_bytes else []


def worker_bytes(fleet: LocalFleet) -> int:
    """Memory of the largest worker."""
    return max((sum(map(resident_bytes, family(worker.pid))) for worker in fleet.workers), default=0)


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


log = logging.getLogger(__name__)

POLL_S = 0.1
HEALTH_TIMEOUT_S = 2.0
EXAMPLE = '{"inputs":"The sky is blue because","parameters":{"max_new_tokens":20}}'


async def wait_until_ready(fleet: LocalFleet) -> bool:
    """Wait until the fleet can serve, and log what it waits for. Returns False if it is stopped before."""
    last: dict[str, str] = {}
    said = ""
    async with PoolClient.connect(fleet.settings) as pool:
        while not await is_ready(fleet):
            if not all(process.should_run for process in fleet.ours):
                return False
            if (text := await describe_wait(fleet, pool, last)) != said:
                log.info("waiting for %s", text)
            said = text
            await asyncio.sleep(POLL_S)
    return True


async def describe_wait(fleet: LocalFleet, pool: PoolClient, last: dict[str, str]) -> str:
    """Say what the start waits for, such as `w0 w1: loading smollm2`, by what the workers themselves report.

    `last`: name → what a worker reported last. It stands for a worker that reports nothing for a moment,
    because it has just loaded or failed.
    """
    workers: dict[str, list[str]] = {}
    try:
        async with pool.redis.pipeline(transaction=False) as pipe:
            for worker in fleet.workers:
                pipe.exists(pool.keys.worker(worker.incarnation))
                pipe.hget(pool.keys.process("starting", worker.incarnation), "doing")
            pipe.exists(pool.keys.batcher)
            pipe.zcard(pool.keys.workers)
            *answers, is_led, num_workers = await pipe.execute()
    except ERRORS:
        return "the broker"
    for worker, is_ready, doing in zip(fleet.workers, answers[::2], answers[1::2], strict=True):
        if not is_ready:
            last[worker.name] = doing.decode() if doing else last.get(worker.name, "starting")
            workers.setdefault(last[worker.name], []).append(worker.name)
    if not workers:
        if not num_workers:
            return "a worker"
        return "the gateway" if is_led else "the batcher"
    return ", ".join(f"{' '.join(names)}: {doing}" for doing, names in workers.items())


async def is_ready(fleet: LocalFleet) -> bool:
    """Whether the fleet can do its part: answer if it has gateways, compute if it has only workers."""
    if fleet.gateways and not await is_healthy(fleet.settings):
        return False
    # gateways accept requests of models that sleep, so they do not tell whether a worker is ready
    asks_workers = fleet.workers and (fleet.settings.models or not fleet.gateways)
    return not asks_workers or await are_ready(fleet, "worker")


async def are_ready(fleet: LocalFleet, kind: str) -> bool:
    """Whether every process of this kind that should run has a ready heartbeat."""
    running = {process.incarnation for process in fleet.ours if process.kind == kind and process.should_run}
    return bool(running) and running <= await ready(fleet.settings, kind)


async def has_requests(fleet: LocalFleet) -> bool:
    """Whether requests of its pools run or wait."""
    return any(await ask_pools(fleet.settings, lambda pool: pool.redis.xlen(pool.keys.requests)))


async def ready(settings: Settings, kind: str) -> set[str]:
    """First incarnations of a kind that have a ready heartbeat."""

    async def ready_of(pool: PoolClient) -> set[str]:
        if kind != "worker":
            return {*await pool.processes("jobworker" if kind == "jobs" else kind)}
        heartbeats = (await pool.look_at_workers([], ["state"])).heartbeats
        return {first_incarnation(name) for name, (state,) in heartbeats.items() if state}

    return set().union(*await ask_pools(settings, ready_of))


async def ask_pools(settings: Settings, question: Callable[[PoolClient], Awaitable[Any]]) -> list[Any]:
    """What is true of each pool; nothing, if the broker does not answer."""
    try:
        async with asyncio.timeout(HEALTH_TIMEOUT_S), PoolClient.connect(settings) as own:
            return [await question(pool) for pool in map(own.of_pool, settings.pools)]
    except ERRORS:
        return []


async def wait_for_broker(settings: Settings) -> None:
    while True:
        with contextlib.suppress(SettingError):
            await check_broker(broker_url(settings))
            return
        await asyncio.sleep(POLL_S)


async def is_healthy(settings: Settings) -> bool:
    host, port = prepare.local_address(settings)
    try:
        async with asyncio.timeout(HEALTH_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            status = await reader.readline()
            writer.close()
    except (OSError, ValueError):
        return False
    return b" 200 " in status


def last_lines(settings: Settings) -> str:
    """The last lines of a start: the URLs of the fleet, and a first request. They are logged, so they do not
    have the key itself. PUBLIC_URL is the address of a proxy.
    """
    url = os.environ.get("PUBLIC_URL") or prepare.base_url(settings)
    key = ' -H "Authorization: Bearer $API_KEY"' if settings.api_key else ""
    return "\n".join(
        [
            f"Tokenfleet serves {settings.model_name} at {url}",
            f"  page: {url} (open it in a browser to chat, and to watch the fleet)",
            f"  docs: {url}/docs",
            f"  try:  curl -N {url}/generate_stream{key} -H 'Content-Type: application/json' -d '{EXAMPLE}'",
        ]
    )


SHORT_STOP_S = 3.0
LAST_WORDS_S = 5.0
"""How long a process may take to end when its time to drain is over."""
ONE_REQUEST_S = 0.5
"""Signals within this time of the first are one request to end."""


class FleetEnded(Exception):
    """The fleet has to end. `str()` is the reason, empty if it has been logged already."""

    def __init__(self, exit_code: int, reason: str = "") -> None:
        super().__init__(reason)
        self.exit_code = exit_code


async def end_on_signals(fleet: LocalFleet) -> None:
    """Wait for SIGTERM or SIGINT, then drain the fleet until it is drained or a second signal comes. Raises
    FleetEnded.
    """
    signalled = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, signalled.set)
    await signalled.wait()
    await run_until_one_ends(drain(fleet), end_at_second_signal(signalled))
    raise FleetEnded(0)


async def end_at_second_signal(signalled: asyncio.Event) -> None:
    """Raises FleetEnded at a second signal. A signal to our whole process group often comes twice, because a
    parent (make, timeout, systemd) passes it on: the two count as one.
    """
    await asyncio.sleep(ONE_REQUEST_S)
    signalled.clear()
    await signalled.wait()
    raise FleetEnded(1, "a second signal: the fleet ends without waiting for requests")


async def drain(fleet: LocalFleet) -> None:
    """Stop gateways when their requests are finished, then batchers and workers, then the broker.

    A machine that shuts down may have signalled them as well. Answers that gateways have handed over by then
    go to their successors first.
    """
    await fleet.keeper.wait_for_heirs()
    fleet.is_ending = True
    fleet.keeper.close()  # first: a gateway without it finishes its answers itself
    timeout_s = fleet.settings.graceful_termination_timeout
    log.info(
        "waiting up to %.0f s for running requests to finish; new ones get 503. Signal again (Ctrl-C) to end "
        "now",
        timeout_s,
    )
    await stop([*fleet.gateways, *fleet.jobs], timeout_s + LAST_WORDS_S)
    rest_s = SHORT_STOP_S if fleet.is_whole else timeout_s + LAST_WORDS_S
    await stop([*fleet.batchers, *fleet.workers], rest_s)
    await stop(fleet.brokers, SHORT_STOP_S)
