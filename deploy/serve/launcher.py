"""`tokenfleet serve`: starts the whole fleet on this machine, keeps every process of it alive, and ends it in
order.
"""

import asyncio
import contextlib
import logging
import os
from functools import partial

from common.settings.settings import Settings
from deploy.serve import checks
from deploy.serve.deaths import DEATHS, report_death
from deploy.serve.embedded_broker import embedded
from deploy.serve.fleet import LocalFleet, new_fleet
from deploy.serve.shutdown import FleetEnded, end_on_signals
from deploy.serve.startup import are_ready, last_lines, wait_for_broker, wait_until_ready
from deploy.serve.stopped import end_stopped
from deploy.serve.supervised_process import SupervisedProcess, describe, kill

log = logging.getLogger(__name__)


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
