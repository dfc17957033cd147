"""Launcher: starts the processes of a fleet, keeps each of them alive, replaces them, and ends them in order.

`tokenfleet serve` runs a whole fleet, `tokenfleet supervise KIND` one process of it. When a process ends, the
launcher says so in Redis, so that others need not wait until its heartbeat or its lease expires.

A roll replaces the processes one by one, with the files and settings that hold now. The successor of a worker
or batcher is ready beside it before the old one is told to leave, so there is room for the rows that it hands
over. A gateway or job worker is replaced where it is: the socket keeper keeps a gateway's answers for its
successor.
"""

import asyncio
import contextlib
import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from subprocess import DEVNULL, Popen
from typing import Any

import setproctitle

from common.broker import heartbeat
from common.broker.client import ERRORS
from common.broker.pool_client import PoolClient
from common.messages.codec import encode
from common.messages.plan import WorkerDied
from common.metrics.exposition import WAITS_FOR_PORT
from common.process import logs
from common.process.launch import die_with_parent
from common.settings.flags import FlagParser
from common.settings.settings import SettingError, Settings
from deploy.launcher import prepare
from deploy.launcher.control_socket import Order, OrderFailed, RunningFleet, Say, current_folder, listening
from deploy.launcher.embedded_broker import embedded
from deploy.launcher.fleet import (
    KINDS,
    LAST_WORDS_S,
    FleetEnded,
    LocalFleet,
    are_ready,
    command,
    end_on_signals,
    has_requests,
    last_lines,
    new_fleet,
    num_processes,
    ready,
    sharing_weights,
    wait_for_broker,
    wait_until_ready,
)
from deploy.launcher.process import PROC, Restarts, SupervisedProcess, describe, family, stop

FIXED = (
    *("port", "hostname", "gateway_port", "metrics_port", "redis_url", "pool", "model_id", "revision"),
    *("num_gateways", "num_batchers", "num_workers", "num_jobs", "nnodes", "node_rank"),
)
"""Settings that a roll cannot change: where the fleet listens, what it serves, how many processes it has."""
BESIDE = ("worker", "batcher")
"""Kinds whose successor starts beside the old process."""


@dataclass(frozen=True, slots=True)
class Roll:
    """One roll.

    Attributes:
        settings: after it.
        changed, before: variables of processes that differ, as they will be and as they were.
        start: supervises one more process.
    """

    fleet: LocalFleet
    settings: Settings
    changed: Mapping[str, str]
    before: Mapping[str, str]
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
        old = fleet.settings.environ()
        settings = Settings.read([], {**old, **given})
        new = settings.environ()
        changed = {name: new.get(name, "") for name in old | new if new.get(name, "") != old.get(name, "")}
        before = {name: old.get(name, "") for name in changed}
        return cls(fleet, settings, changed, before, start, say)

    async def run(self) -> None:
        """Replace every process. Raises OrderFailed; the processes that are not replaced run as before."""
        for preloaded in self.fleet.preloaded:  # it has read the files and settings of before
            await preloaded.renew(self.changed)
        try:
            for members in (self.fleet.workers, self.fleet.batchers, self.fleet.gateways, self.fleet.jobs):
                for process in [*members]:
                    await self.replace(members, process)
        except OrderFailed:
            for preloaded in self.fleet.preloaded:
                await preloaded.renew(self.before)
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
        environ = {**old.environ, **self.changed, WAITS_FOR_PORT: "1"}
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
        process.environ = {**process.environ, **self.changed}
        running = process.running
        await process.end(self.settings.graceful_termination_timeout + LAST_WORDS_S)
        while process.incarnation == was or process.running is running:
            self.check_fleet()
            await asyncio.sleep(POLL_S)
        if not await self.becomes_ready(process):
            process.environ = {**process.environ, **self.before}
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


log = logging.getLogger(__name__)

POLL_S = 0.1
REPORT_TIMEOUT_S = 5.0
DEATH_NOTE_TTL_S = 60
TOLD = ("worker", "gateway", "batcher")
"""Kinds whose deaths are told in Redis."""
NUM_LOOKS = 5
"""A process is ended when this many looks in a row find the same stop. Looks are counted, not seconds: the
launcher may have been stopped itself, and processes get a moment to go on after it does.
"""
STOPPED = b"T"
"""State in /proc of a process that a signal stopped. `t`, held by a debugger, is left alone."""
SUPERVISE_HELP = f"""Start one process of a fleet and keep it alive, as containers do.

KIND is {", ".join(KINDS)}; flags are those of `tokenfleet KIND --help`."""


def serve(settings: Settings) -> int:
    """Run `tokenfleet serve`. Returns the exit code.

    Raises:
        SettingError: the settings cannot be served; nothing was started.
    """
    started = [kind for kind, number in num_processes(settings).items() if number]
    prepare.set_hub_variables(settings)
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
    word = argv[0] if argv else ""
    if word in ("-h", "--help"):
        print(f"usage: tokenfleet supervise KIND [--setting X …]\n\n{SUPERVISE_HELP}")
        return 0
    if word not in KINDS:
        kinds = ", ".join(KINDS)
        raise SettingError(
            "kind", f"{word!r} is not one of {kinds}" if word else f"is missing; one of {kinds}"
        )
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
        for preloaded in fleet.preloaded:
            questions = partial(are_ready, fleet, preloaded.kind), partial(has_requests, fleet)
            tasks.create_task(preloaded.keep_one_waiting(*questions))


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
