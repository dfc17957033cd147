"""Launcher: starts the processes of a fleet, keeps each of them alive, replaces them, and ends them in order.

`tokenfleet serve` runs a whole fleet, `tokenfleet supervise KIND` one process of it. A first signal drains
the fleet, a second one ends it at once. When a process ends, the launcher says so in Redis, so that others
need not wait until its heartbeat or its lease expires.

A roll replaces the processes one by one, with the files and settings that hold now. The successor of a worker
or batcher is ready beside it before the old one is told to leave, so there is room for the rows that it hands
over. A gateway is replaced where it is: the socket keeper keeps its answers for its successor.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from subprocess import DEVNULL, Popen
from typing import Any

import setproctitle

from common.broker import heartbeat
from common.broker.client import ERRORS, broker_url
from common.broker.pool_client import PoolClient
from common.messages.codec import encode
from common.messages.kept_answer import WHOLE_FLEET_VARIABLE
from common.messages.plan import WorkerDied
from common.metrics.exposition import WAITS_FOR_PORT
from common.process import logs, machine
from common.process.event_loop import run_until_one_ends
from common.process.launch import WEIGHTS_VARIABLE, die_with_parent
from common.process.logs import first_incarnation
from common.rank import follows
from common.settings.fields import MAX_PORT
from common.settings.flags import FlagParser
from common.settings.settings import SettingError, Settings
from deploy.launcher import prepare
from deploy.launcher.control_socket import Order, OrderFailed, RunningFleet, Say, current_folder, listening
from deploy.launcher.embedded_broker import Broker, embedded
from deploy.launcher.process import (
    PROC,
    Restarts,
    SupervisedProcess,
    Template,
    describe,
    family,
    resident_bytes,
    stop,
)
from deploy.launcher.socket_keeper import SocketKeeper

log = logging.getLogger(__name__)

# --- the fleet ----------------------------------------------------------------------------------------------

KEPT_S = 30.0
"""How long connections that a gateway has left wait for another one."""

MODULES = {"batcher": "batcher", "worker": "gpu_worker", "gateway": "api"}
TEMPLATES = {
    "worker": {"worker": "gpu_worker.process"},
    "gateway": {"gateway": "api.app", "batcher": "batcher.process"},
}
"""Kind that decides when a template loads everything → kinds of its copies, and what they run."""
KINDS = {"api": "gateway", "batcher": "batcher", "worker": "worker"}
"""Words of the command line → kinds of processes."""


@dataclass(slots=True)
class LocalFleet:
    """The processes that `tokenfleet serve` runs; with `tokenfleet supervise` a single one.

    Attributes:
        settings: with the `redis_url` that all processes use.
        brokers: the embedded broker; empty when REDIS_URL leads to another.
        was_ready: whether the fleet ever served.
        is_ending: whether the launcher was told to end. A process that then ends with 0 was told, too.
        templates: of which its processes are copies.
        keeper: keeps copies of the sockets of answers; closed when the fleet ends.
    """

    settings: Settings
    brokers: list[SupervisedProcess]
    batchers: list[SupervisedProcess]
    workers: list[SupervisedProcess]
    gateways: list[SupervisedProcess]
    was_ready: bool = False
    is_ending: bool = False
    templates: Sequence[Template] = ()
    keeper: SocketKeeper = field(default_factory=SocketKeeper)

    @property
    def all(self) -> list[SupervisedProcess]:
        return [*self.brokers, *self.ours]

    @property
    def ours(self) -> list[SupervisedProcess]:
        """All but the broker, in the order of their start."""
        return [*self.batchers, *self.workers, *self.gateways]

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
    environs = {kind: [settings.environ() | users[kind]] * counts.get(kind, 0) for kind in MODULES}
    pools = [settings.of_pool(pool).environ() | users["batcher"] for pool in settings.pools]
    environs["batcher"] = pools * counts.get("batcher", 0)
    templates = {
        kind: Template(kind, modules, environs[kind][0])
        for kind, modules in TEMPLATES.items()
        if settings.preload and environs[kind] and sys.platform == "linux"
    }
    template_of = {made: template for template in templates.values() for made in template.modules}
    members = {
        kind: [
            SupervisedProcess(kind, f"{kind[0]}{number}", command(module), own, template_of.get(kind))
            for number, own in enumerate(environs[kind])
        ]
        for kind, module in MODULES.items()
    }
    fleet = LocalFleet(
        settings=settings,
        brokers=[supervised_broker(broker)] if broker else [],
        batchers=members["batcher"],
        workers=members["worker"],
        gateways=members["gateway"],
        templates=[*templates.values()],
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
    templates = [one for one in fleet.templates if one.kind == "worker"]
    processes: list[SupervisedProcess | Template] = [*fleet.workers, *templates]
    for process in processes:
        process.environ = {**process.environ, WEIGHTS_VARIABLE: str(handle)}
    try:
        yield
    finally:
        os.close(handle)


def can_load(settings: Settings, kind: str) -> bool:
    """Whether a template can load what its copies have. For workers that is the model, if it is on CPU and
    has one rank.
    """
    is_whole = settings.num_ranks == settings.nnodes == 1 and not settings.models  # or which of them?
    return kind != "worker" or (is_whole and not prepare.caches_on_gpu(settings))


def has_memory(fleet: LocalFleet, kind: str) -> bool:
    """Whether memory suffices for what a template loads: for workers an engine, if as much stays free."""
    caches_bytes = fleet.settings.num_workers * fleet.settings.cpu_cache_bytes  # they fill as they are used
    return kind != "worker" or 2 * engine_bytes(fleet) + caches_bytes <= machine.available_bytes()


def engine_bytes(fleet: LocalFleet) -> int:
    """Resident memory of the largest engine."""
    engines = [pid for worker in fleet.workers for pid in family(worker.pid) if pid != worker.pid]
    return max(map(resident_bytes, engines), default=0)


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


# --- start --------------------------------------------------------------------------------------------------

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
            return {*await pool.processes(kind)}
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
            await prepare.ask_broker(broker_url(settings))
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


# --- run ----------------------------------------------------------------------------------------------------

REPORT_TIMEOUT_S = 5.0
DEATH_NOTE_TTL_S = 60
TOLD = ("worker", "gateway", "batcher")
"""Kinds whose deaths are told in Redis."""
NUM_LOOKS = 3
"""A process is ended when this many looks in a row find the same stop. Looks are counted, not seconds: the
launcher may have been stopped itself, and processes get a moment to go on after it does.
"""
STOPPED = b"T"
"""State in /proc of a process that a signal stopped. `t`, held by a debugger, is left alone."""


def serve(settings: Settings) -> int:
    """Run `tokenfleet serve`. Returns the exit code.

    Raises:
        SettingError: the settings cannot be served; nothing was started.
    """
    started = [kind for kind, number in num_processes(settings).items() if number]
    checks = ("fleet", *(["GPU"] if settings.num_workers else []), "port", "memory", "broker")
    prepare.check_start(settings, checks, *started)
    if settings.num_workers and not prepare.caches_on_gpu(settings) and not prepare.weights(settings):
        # while it is downloaded or converted
        Popen(command("gpu_worker.engine.cpu.compile"), stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL)
    settings = prepare.with_model(settings)
    prepare.say_access(settings)
    own = embedded(settings.pools) if settings.redis_url is None else contextlib.nullcontext()
    with own as broker:
        if broker is not None:
            log.info("the broker is at %s, for this user alone", broker.url)
            files = settings.files_dir or str(broker.directory / "files")
            settings = settings.model_copy(update={"redis_url": broker.url, "files_dir": files})
        return asyncio.run(run(new_fleet(settings, broker)))


def main(argv: Sequence[str]) -> int:
    """Run `tokenfleet supervise`. Returns the exit code. Raises SettingError."""
    what = "Start one process of a fleet and keep it alive, as containers do."
    parser = FlagParser("tokenfleet supervise", "%(prog)s KIND [--setting X …]", description=what)
    parser.add_argument("kind", choices=KINDS, help="its flags are those of `tokenfleet KIND --help`")
    word = parser.parse_args(argv[:1]).kind
    kind = KINDS[word]
    name, settings = read_process(kind, argv[1:], f"tokenfleet supervise {word}")
    logs.set_up(f"supervisor of {name}", settings.log_level, settings.json_output)
    die_with_parent()
    setproctitle.setproctitle(f"tokenfleet supervise {word}")
    settings = prepare.prepare(settings, kind)
    fleet = new_fleet(settings, None, {kind: 1})
    [process] = fleet.ours
    process.name = name
    return asyncio.run(run(fleet))


def read_process(kind: str, argv: Sequence[str], prog: str, description: str = "") -> tuple[str, Settings]:
    """The name of a process that starts alone, and its settings. Raises SettingError."""
    parser = FlagParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--name", default=f"{kind[0]}0")
    own, rest = parser.parse_known_args(list(argv))
    description += f"--name X (default {kind[0]}0) is its name in logs and in `tokenfleet status`."
    return own.name, Settings.read(rest, prog=prog, description=description)


async def run(fleet: LocalFleet) -> int:
    """Start and supervise the processes until a signal or a fatal error. Returns the exit code, when no
    process is left.
    """
    over = FleetEnded(0)
    try:
        with sharing_weights(fleet):
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(end_on_signals(fleet))
                tasks.create_task(end_stopped(fleet))
                tasks.create_task(launch(fleet, tasks))
                tasks.create_task(take_orders(fleet, tasks))
    except* FleetEnded as group:
        over = next(error for error in group.exceptions if isinstance(error, FleetEnded))
    finally:
        for template in fleet.templates:
            await template.end()
        await stop(fleet.ours, 0)
        await stop(fleet.brokers, 0)  # last: the others log errors without it
    if str(over):
        log.error("%s", over)
    elif fleet.is_ending:
        log.info("the fleet has ended")
    return over.exit_code


async def launch(fleet: LocalFleet, tasks: asyncio.TaskGroup) -> None:
    for process in fleet.brokers:
        tasks.create_task(supervise(process, fleet, tasks))
        await wait_for_broker(fleet.settings)
    for process in fleet.ours:
        tasks.create_task(supervise(process, fleet, tasks))
    if not fleet.follows and await wait_until_ready(fleet):
        fleet.was_ready = True
        if fleet.gateways:
            show = log.info if fleet.settings.json_output else partial(print, flush=True)
            show(last_lines(fleet.settings))
        for template in fleet.templates:
            has_room = partial(has_memory, fleet, template.kind)
            questions = partial(are_ready, fleet, template.kind), partial(has_requests, fleet), has_room
            if can_load(fleet.settings, template.kind):
                tasks.create_task(template.keep_loaded(*questions))


async def take_orders(fleet: LocalFleet, tasks: asyncio.TaskGroup) -> None:
    """Take orders of this user, one at a time. Never returns."""
    is_busy = asyncio.Lock()

    async def carry_out(order: Order, say: Say) -> None:
        if is_busy.locked():
            raise OrderFailed("another roll is under way")
        async with is_busy:
            await Roll.prepare(fleet, order, start, say).run()

    def start(process: SupervisedProcess) -> None:
        tasks.create_task(supervise(process, fleet, tasks))

    settings = fleet.settings
    own = RunningFleet(
        os.getpid(),
        current_folder(),
        setproctitle.getproctitle(),
        prepare.base_url(settings) if fleet.gateways else "",
        settings.redis_url or "",
        settings.directory_url or settings.redis_url or "",
        settings.pool,
    )
    async with listening(own, carry_out):
        await asyncio.Future()


async def supervise(process: SupervisedProcess, fleet: LocalFleet, tasks: asyncio.TaskGroup) -> None:
    """Start a process, and start it again whenever it ends, as long as `should_run`."""
    while process.should_run:
        returncode, lived_s = await process.run_once()
        if not process.should_run or (fleet.is_ending and returncode == 0):
            return
        if process.kind in TOLD and not fleet.follows:
            for pool in pools_of(process, fleet.settings):
                settings = fleet.settings.of_pool(pool)
                tasks.create_task(report_death(settings, process.kind, process.incarnation))
        if not fleet.was_ready and (returncode == os.EX_CONFIG or not fleet.follows):
            if returncode == os.EX_CONFIG:  # it has printed the setting itself
                raise FleetEnded(os.EX_CONFIG)
            raise FleetEnded(1, f"{process.name} ended before the fleet was ready: {describe(returncode)}")
        pause_s = process.restarts.pause_s(lived_s)
        log.log(
            logging.WARNING if returncode else logging.INFO,  # 0: somebody told it to end, as a roll or drain
            "%s ended after %.1f s: %s; starts again in %.1f s",
            process.name,
            lived_s,
            describe(returncode),
            pause_s,
        )
        await asyncio.sleep(pause_s)


def pools_of(process: SupervisedProcess, settings: Settings) -> Sequence[str]:
    """The pools that a process may have been in: a worker serves all models in turns, others have one."""
    return settings.pools if process.kind == "worker" else (process.environ.get("POOL", settings.pool),)


async def tell_death(pool: PoolClient, kind: str, incarnation: str) -> None:
    """Tell the batcher that a worker has ended; note it in a gateway's heartbeat, if that has not expired, so
    that others claim its jobs; release the lease that a batcher held.
    """
    if kind == "worker":
        entry: Any = {"died": encode(WorkerDied(incarnation))}
        await pool.redis.xadd(pool.keys.control, entry)
    elif kind == "batcher":
        lease = heartbeat.lease(pool.keys, holder=incarnation, ttl_ms=0, own_epoch="", clock_ms=b"")
        await pool.run(lease)
    elif await pool.redis.exists(key := pool.keys.gateway(incarnation)):
        async with pool.redis.pipeline() as pipe:
            pipe.hset(key, "state", "died")
            pipe.expire(key, DEATH_NOTE_TTL_S, lt=True)
            await pipe.execute()


async def report_death(settings: Settings, kind: str, incarnation: str) -> None:
    """Say in Redis that a process has ended. Gives up after REPORT_TIMEOUT_S."""
    async with PoolClient.connect(settings) as pool:
        try:
            async with asyncio.timeout(REPORT_TIMEOUT_S):
                while True:
                    with contextlib.suppress(*ERRORS):
                        await tell_death(pool, kind, incarnation)
                        return
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            log.warning(
                "the broker does not answer: others learn of the end of %s when its heartbeat expires",
                incarnation,
            )


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped a process; False wherever there is no /proc."""
    try:
        line = (PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return False
    return line[line.rindex(b")") + 2 :].split()[0] == STOPPED


async def end_stopped(fleet: LocalFleet) -> None:
    """End every process that stays stopped (SIGSTOP) for STOPPED_GRACE_S, or has started one that does.

    A stopped process answers nobody, and keeps what it holds until its heartbeat or lease expires. In /proc a
    stop is certain, however loaded the machine is.
    """
    grace_s = fleet.settings.stopped_grace_s
    seen: Counter[int] = Counter()
    while grace_s:
        await asyncio.sleep(grace_s / NUM_LOOKS)
        found = {pid: process for process in fleet.all for pid in family(process.pid) if is_stopped(pid)}
        seen = Counter({pid: seen[pid] + 1 for pid in found})
        for pid, process in found.items():
            if seen[pid] == NUM_LOOKS:
                log.warning("%s is ended: process %d was stopped, and does not go on", process.name, pid)
                process.kill()


# --- roll ---------------------------------------------------------------------------------------------------

FIXED = (
    *("port", "hostname", "gateway_port", "metrics_port", "redis_url", "pool", "model_id", "revision"),
    *("models", "num_gateways", "num_batchers", "num_workers", "nnodes", "node_rank"),
)
"""Settings that a roll cannot change: where the fleet listens, what it serves, how many processes it has."""
BESIDE = ("worker", "batcher")
"""Kinds whose successor starts beside the old process."""


@dataclass(frozen=True, slots=True)
class Roll:
    """One roll.

    Attributes:
        settings: after it; until then the fleet's are those of before.
        start: supervises one more process.
    """

    fleet: LocalFleet
    settings: Settings
    start: Callable[[SupervisedProcess], object]
    say: Say

    @classmethod
    def prepare(
        cls, fleet: LocalFleet, order: Order, start: Callable[[SupervisedProcess], object], say: Say
    ) -> "Roll":
        """Raises SettingError for a setting that cannot be changed, OrderFailed for a fleet that cannot be
        rolled.
        """
        if not fleet.was_ready or fleet.is_ending:
            raise OrderFailed("the fleet starts or ends; nothing is replaced")
        if fleet.settings.nnodes > 1:
            raise OrderFailed("a worker of several machines (NNODES) is replaced by its own launchers")
        given: dict[str, str] = order.get("settings", {})
        for name in given:
            if name.lower() in FIXED:
                raise SettingError(name, "cannot be changed by a roll; start the fleet anew")
        settings = Settings.read([], {**fleet.settings.environ(), **given})
        if settings.served_model_name != fleet.settings.served_model_name:
            names = (*settings.served_model_name, fleet.settings.given_model_id)
            settings = settings.model_copy(update={"served_model_name": names})
        return cls(fleet, settings, start, say)

    def changed(self, environ: Mapping[str, str], back: bool = False) -> dict[str, str]:
        """The environment of a process or template with the settings after the roll; `back`: before it."""
        old, new = (self.settings, self.fleet.settings) if back else (self.fleet.settings, self.settings)
        before, after = (one.of_pool(environ["POOL"]).environ() for one in (old, new))
        return {**environ, **{name: value for name, value in after.items() if value != before[name]}}

    async def run(self) -> None:
        """Replace every process. Raises OrderFailed; processes that are not replaced run as before, and the
        others do from their next start on.
        """
        for template in self.fleet.templates:  # it has read the files and settings of before
            await template.renew(self.changed(template.environ))
        try:
            for members in (self.fleet.workers, self.fleet.batchers, self.fleet.gateways):
                for process in [*members]:
                    await self.replace(members, process)
        except OrderFailed:
            for process in self.fleet.ours:
                process.environ = self.changed(process.environ, back=True)
            for template in self.fleet.templates:
                await template.renew(self.changed(template.environ, back=True))
            raise
        self.fleet.settings = self.settings

    async def replace(self, members: list[SupervisedProcess], old: SupervisedProcess) -> None:
        was = old.incarnation
        if old.kind not in BESIDE or not await self.replace_beside(members, old):
            await self.replace_in_place(old)
        self.say(f"{was} is replaced")

    async def replace_beside(self, members: list[SupervisedProcess], old: SupervisedProcess) -> bool:
        """Start a successor, and end the old process once that is ready. Return whether there was room for
        both: a GPU holds one worker.
        """
        environ = self.changed(old.environ) | {WAITS_FOR_PORT: "1"}
        new = replace(old, environ=environ, incarnation="", running=None, restarts=Restarts())
        members.append(new)
        self.start(new)
        if not await self.becomes_ready(new):
            members.remove(new)
            new.should_run = False
            new.kill()
            if not prepare.caches_on_gpu(self.settings):
                raise OrderFailed(f"{old.name} stays: its successor did not start, as the log says")
            return False
        await stop([old], self.settings.graceful_termination_timeout + LAST_WORDS_S)
        members.remove(new)
        members[members.index(old)] = new
        return True

    async def replace_in_place(self, process: SupervisedProcess) -> None:
        """End a process, and wait until its supervisor's next run of it is ready."""
        was = process.incarnation
        process.environ = self.changed(process.environ)
        running = process.running
        await process.end(self.settings.graceful_termination_timeout + LAST_WORDS_S)
        while process.incarnation == was or process.running is running:
            self.check_fleet()
            await asyncio.sleep(POLL_S)
        if not await self.becomes_ready(process):
            raise OrderFailed(f"{process.name} did not start, as the log says; it starts again as it was")

    async def becomes_ready(self, process: SupervisedProcess) -> bool:
        """Wait until the run of a process that has just begun is ready. False if it ends before."""
        first = ""
        while True:
            self.check_fleet()
            first = first or process.incarnation
            if process.incarnation != first or (process.running and process.pid is None):
                return False
            if first and first in await ready(self.fleet.settings, process.kind):
                return True
            await asyncio.sleep(POLL_S)

    def check_fleet(self) -> None:
        if self.fleet.is_ending:
            raise OrderFailed("the fleet ends")


# --- end ----------------------------------------------------------------------------------------------------

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
    await stop(fleet.gateways, timeout_s + LAST_WORDS_S)
    rest_s = SHORT_STOP_S if fleet.is_whole else timeout_s + LAST_WORDS_S
    await stop([*fleet.batchers, *fleet.workers], rest_s)
    await stop(fleet.brokers, SHORT_STOP_S)
