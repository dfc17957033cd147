"""`tokenfleet serve`: starts the whole fleet on this machine, keeps every process of it alive, and ends it in
order.

Deaths: what the launcher says in Redis of a process that has ended.

So nobody waits until its heartbeat or its lease expires.

Stopped processes: ends those of the fleet that were stopped (SIGSTOP) and do not go on.

A stopped process answers nobody and keeps what it holds until its heartbeat or lease expires. Whoever is
stopped is certain in /proc, however loaded the machine is; so it need not be waited for.

`tokenfleet supervise KIND`: keeps one process of a fleet alive, as containers do.
"""

import asyncio
import contextlib
import logging
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import setproctitle

from common.broker import batcher_scripts
from common.broker.client import ERRORS
from common.broker.pool_client import PoolClient
from common.messages.codec import encode
from common.messages.plan import WorkerDied
from common.process import logs
from common.process.parent_death import die_with_parent
from common.settings.settings import SettingError, Settings
from deploy.launcher import checks
from deploy.launcher.embedded_broker import embedded
from deploy.launcher.fleet import KINDS, LocalFleet, build_fleet, new_fleet
from deploy.launcher.preloaded_process import PROC, family
from deploy.launcher.shutdown import FleetEnded, end_on_signals
from deploy.launcher.startup import are_ready, last_lines, wait_for_broker, wait_until_ready
from deploy.launcher.supervised_process import SupervisedProcess, describe, kill

log = logging.getLogger(__name__)

POLL_S = 0.1
REPORT_TIMEOUT_S = 5.0
NOTE_TTL_S = 60


async def report_worker(pool: PoolClient, incarnation: str) -> None:
    """Tell the batcher that a worker has ended."""
    entry: Any = {"died": encode(WorkerDied(incarnation))}
    await pool.redis.xadd(pool.keys.control, entry)


async def mark_gateway(pool: PoolClient, incarnation: str) -> None:
    """Note the death in what is left of a gateway's heartbeat: the others claim its jobs."""
    key = pool.keys.gateway(incarnation)
    if await pool.redis.exists(key):
        async with pool.redis.pipeline() as pipe:
            pipe.hset(key, "state", "died")
            pipe.expire(key, NOTE_TTL_S, lt=True)
            await pipe.execute()


async def release_lease(pool: PoolClient, incarnation: str) -> None:
    """Release the lease, if this batcher held it: another takes it."""
    await pool.run(batcher_scripts.lease(pool.keys, holder=incarnation, ttl_ms=0, own_epoch="", clock_ms=b""))


DEATHS: dict[str, Callable[[PoolClient, str], Awaitable[None]]] = {
    "worker": report_worker,
    "gateway": mark_gateway,
    "batcher": release_lease,
}
"""What is said, by the kind of the process."""


async def report_death(settings: Settings, kind: str, incarnation: str) -> None:
    """Say that a process has ended, for as long as that is sooner than what it left behind expires."""
    async with PoolClient.connect(settings) as pool:
        try:
            async with asyncio.timeout(REPORT_TIMEOUT_S):
                while True:
                    with contextlib.suppress(*ERRORS):
                        await DEATHS[kind](pool, incarnation)
                        return
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            log.warning(
                "the broker does not answer: others learn of the end of %s when its heartbeat expires",
                incarnation,
            )


NUM_LOOKS = 5
"""So many looks in a row must find one stop. They are counted, not seconds: while the launcher itself was
stopped, nobody could go on before it looked again.
"""
STOPPED = b"T"
"""By a signal; `t` is held by a debugger, which is left alone."""


@dataclass(frozen=True, slots=True)
class Stop:
    """One stop of a process: it has had so much processor time, and gets none before it goes on."""

    pid: int
    started_ticks: int
    cpu_ticks: int


def read_stop(pid: int) -> Stop | None:
    """The stop of a process that is stopped; elsewhere than on Linux nobody is seen to be."""
    try:
        line = (PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return None
    fields = line[line.rindex(b")") + 2 :].split()
    if fields[0] != STOPPED:
        return None
    return Stop(pid, int(fields[19]), int(fields[11]) + int(fields[12]))


async def end_stopped(fleet: LocalFleet) -> None:
    """End every process of which a part stays stopped for STOPPED_GRACE_S, with all that it has started."""
    grace_s = fleet.settings.stopped_grace_s
    seen: Counter[Stop] = Counter()
    while grace_s:
        await asyncio.sleep(grace_s / NUM_LOOKS)
        found = {
            stop: process for process in fleet.all for pid in family(process.pid) if (stop := read_stop(pid))
        }
        seen = Counter({stop: seen[stop] + 1 for stop in found})
        for stop, process in found.items():
            if seen[stop] == NUM_LOOKS:
                log.warning("%s is ended: process %d was stopped, and does not go on", process.name, stop.pid)
                process.kill()


def serve(settings: Settings) -> int:
    """Run a fleet until it is told to end. Returns the exit code.

    Raises:
        SettingError: the settings cannot be served; nothing was started.
    """
    checks.check_ranks()
    checks.check_port(settings)
    checks.check_memory(settings)
    if settings.redis_url is not None:
        checks.check_broker(settings)
    settings = checks.with_model(settings)
    log.info("%s", checks.describe_access(settings))
    own = embedded(settings.port) if settings.redis_url is None else contextlib.nullcontext()
    with own as broker:
        if broker is not None:
            log.info("the broker is at %s, for this user alone", broker.url)
            settings = settings.model_copy(update={"redis_url": broker.url})
        return asyncio.run(run(new_fleet(settings, broker)))


async def run(fleet: LocalFleet) -> int:
    """Start and supervise the processes until a signal or a fatal end. Returns the exit code; no process is
    left.
    """
    over = FleetEnded(0)
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(end_on_signals(fleet))
            tasks.create_task(end_stopped(fleet))
            tasks.create_task(launch(fleet, tasks))
    except* FleetEnded as group:
        over = next(error for error in group.exceptions if isinstance(error, FleetEnded))
    finally:
        await kill(fleet.ours)
        await kill(fleet.brokers)  # last: the others log errors without it
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
    if await wait_until_ready(fleet):
        fleet.was_ready = True
        if fleet.is_whole:
            say_ready(fleet.settings)
        for preloaded in fleet.preloaded:
            tasks.create_task(preloaded.keep_one_waiting(partial(are_ready, fleet, preloaded.kind)))


def say_ready(settings: Settings) -> None:
    """Print how the fleet is used, for people; with JSON_OUTPUT it is a line of the log."""
    if settings.json_output:
        log.info("%s", last_lines(settings))
    else:
        print(last_lines(settings), flush=True)


async def supervise(process: SupervisedProcess, fleet: LocalFleet, tasks: asyncio.TaskGroup) -> None:
    """Start a process, and start it again whenever it ends, as long as `should_run`."""
    while process.should_run:
        returncode, lived_s = await process.run_once()
        if not process.should_run or (fleet.is_ending and returncode == 0):
            return
        if process.kind in DEATHS:
            tasks.create_task(report_death(fleet.settings, process.kind, process.incarnation))
        if not fleet.was_ready:
            if returncode == os.EX_CONFIG:  # it has printed the setting itself
                raise FleetEnded(os.EX_CONFIG)
            raise FleetEnded(1, f"{process.name} ended before the fleet was ready: {describe(returncode)}")
        pause_s = process.restarts.pause_s(lived_s)
        log.warning(
            "%s ended after %.1f s: %s; starts again in %.1f s",
            process.name,
            lived_s,
            describe(returncode),
            pause_s,
        )
        await asyncio.sleep(pause_s)


DESCRIPTION = """Start one process of a fleet and keep it alive, as containers do.

The process is started again at once when it ends; a worker's death is reported to the batcher; a gateway's
answers are kept for its successor.
"""
OPERAND = f"KIND is {', '.join(KINDS)}; settings are those of `tokenfleet KIND --help`."


def main(argv: Sequence[str]) -> int:
    """Run until told to end. Returns the exit code. Raises SettingError."""
    word = argv[0] if argv else ""
    if word in ("-h", "--help"):
        print(f"usage: tokenfleet supervise KIND [--setting X …]\n\n{DESCRIPTION}\n{OPERAND}")
        return 0
    if word not in KINDS:
        kinds = ", ".join(KINDS)
        raise SettingError(
            "kind", f"{word!r} is not one of {kinds}" if word else f"is missing; one of {kinds}"
        )
    kind = KINDS[word]
    settings = Settings.read(argv[1:], prog=f"tokenfleet supervise {word}")
    logs.set_up(f"supervisor of {kind[0]}0", settings.log_level, settings.json_output)
    die_with_parent()
    setproctitle.setproctitle(f"tokenfleet supervise {word}")
    settings = checks.prepare(settings, kind)
    return asyncio.run(run(build_fleet(settings, None, {kind: 1})))
