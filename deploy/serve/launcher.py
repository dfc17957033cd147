"""`tokenfleet serve`: starts the whole fleet on this machine, keeps every process of it alive, and ends it in
order.
"""

import asyncio
import contextlib
import logging
import os
import signal
from typing import Any

from common.broker.client import ERRORS, check_broker, connect
from common.broker.keys import Keys
from common.messages.codec import encode
from common.messages.plan import WorkerDied
from common.process import logs
from common.settings.settings import SettingError, Settings
from deploy.serve import checks
from deploy.serve.broker import embedded
from deploy.serve.fleet import Fleet, new_fleet
from deploy.serve.process import Process, describe, kill, stop

log = logging.getLogger(__name__)

POLL_S = 0.1
PROGRESS_S = 2.0
SHORT_STOP_S = 3.0
ONE_REQUEST_S = 0.5
TELL_S = 5.0
MAX_CONTROL = 10_000
PROMPT = '{"inputs":"The sky is blue because","parameters":{"max_new_tokens":64}}'


class Over(Exception):
    """The fleet is to end: with which exit code, and why, unless somebody has said so already."""

    def __init__(self, exit_code: int, why: str = "") -> None:
        super().__init__(why)
        self.exit_code = exit_code


def serve(settings: Settings) -> int:
    """Runs a fleet until it is told to end. Returns the exit code.

    Raises:
        SettingError: the settings cannot be served; nothing was started.
    """
    logs.set_up("serve", settings.log_level, settings.json_output)
    checks.check_ranks()
    checks.check_port(settings)
    checks.check_memory(settings)
    if settings.redis_url is not None:
        checks.check_broker(settings)
    settings = checks.with_model(settings)
    with embedded() if settings.redis_url is None else contextlib.nullcontext() as broker:
        if broker is not None:
            settings = settings.model_copy(update={"redis_url": broker.url})
        return asyncio.run(run(new_fleet(settings, broker)))


async def run(fleet: Fleet) -> int:
    """Starts and supervises the processes until a signal or a fatal end. Returns the exit code; no process is
    left.
    """
    over = Over(0)
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(heed_signals(fleet))
            tasks.create_task(launch(fleet, tasks))
    except* Over as group:
        over = next(error for error in group.exceptions if isinstance(error, Over))
    finally:
        await kill(fleet.ours)
        await kill(fleet.brokers)  # last, so that nobody complains of it
    if str(over):
        log.error("%s", over)
    return over.exit_code


async def launch(fleet: Fleet, tasks: asyncio.TaskGroup) -> None:
    for process in fleet.brokers:
        tasks.create_task(supervise(process, fleet, tasks))
        await broker_answers(fleet.settings)
    for process in fleet.ours:
        tasks.create_task(supervise(process, fleet, tasks))
    await gateway_answers(fleet)
    fleet.was_ready = True
    url = checks.base_url(fleet.settings)
    command = f"curl -N {url}/generate_stream -H 'Content-Type: application/json' -d '{PROMPT}'"
    print(f"Tokenfleet serves {fleet.settings.served_model_name} at {url} · try: {command}")
    print(f"To chat and to watch, open {url} in a browser; {url}/docs describes the API.", flush=True)


async def supervise(process: Process, fleet: Fleet, tasks: asyncio.TaskGroup) -> None:
    """Starts a process, and starts it again whenever it ends, for as long as it is wanted."""
    while process.wanted:
        returncode, lived_s = await process.live()
        if not process.wanted:
            return
        if process.kind == "worker":
            tasks.create_task(tell_died(fleet.settings, process.incarnation))
        if not fleet.was_ready:
            if returncode == os.EX_CONFIG:  # it has said itself which setting cannot be served
                raise Over(os.EX_CONFIG)
            raise Over(1, f"{process.name} ended before the fleet was ready: {describe(returncode)}")
        pause_s = process.restarts.pause_s(lived_s)
        log.warning(
            "%s ended after %.1f s: %s; starts again in %.1f s",
            process.name,
            lived_s,
            describe(returncode),
            pause_s,
        )
        await asyncio.sleep(pause_s)


async def tell_died(settings: Settings, incarnation: str) -> None:
    """The batcher need not wait until the worker's sign of life has expired."""
    assert settings.redis_url is not None
    entry: Any = {"died": encode(WorkerDied(incarnation))}
    async with connect(settings.redis_url) as client:
        try:
            async with asyncio.timeout(TELL_S):
                while True:
                    with contextlib.suppress(*ERRORS):
                        await client.xadd(Keys(settings.pool).control, entry, maxlen=MAX_CONTROL)
                        return
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            log.warning("no broker to tell that %s ended; its sign of life will expire", incarnation)


async def broker_answers(settings: Settings) -> None:
    assert settings.redis_url is not None
    while True:
        with contextlib.suppress(SettingError):
            return await check_broker(settings.redis_url)
        await asyncio.sleep(POLL_S)


async def gateway_answers(fleet: Fleet) -> None:
    """Returns when the fleet can serve; says meanwhile that it is alive."""
    clock = asyncio.get_running_loop().time
    begun_s = said_s = clock()
    while not await is_healthy(fleet.settings):
        if clock() - said_s >= PROGRESS_S:
            said_s = clock()
            running = " ".join(process.name for process in fleet.all if process.is_running)
            log.info("not ready after %.0f s; running: %s", said_s - begun_s, running)
        await asyncio.sleep(POLL_S)


async def is_healthy(settings: Settings) -> bool:
    host, port = checks.reachable(settings)
    try:
        async with asyncio.timeout(PROGRESS_S):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            status = await reader.readline()
            writer.close()
    except (OSError, ValueError):
        return False
    return b" 200 " in status


async def heed_signals(fleet: Fleet) -> None:
    """The first SIGTERM or SIGINT drains the fleet, a later one ends it now."""
    asked = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, asked.set)
    await asked.wait()
    log.info("draining for up to %.0f s; once more ends it now", fleet.settings.graceful_termination_timeout)
    drained = asyncio.create_task(drain(fleet))
    again = asyncio.create_task(asked_again(asked))
    await asyncio.wait((drained, again), return_when=asyncio.FIRST_COMPLETED)
    raise Over(0 if drained.done() else 1)


async def asked_again(asked: asyncio.Event) -> None:
    """Who signals our whole group is often followed by who passes the same signal on (make, timeout,
    systemd): that is one request.
    """
    await asyncio.sleep(ONE_REQUEST_S)
    asked.clear()
    await asked.wait()


async def drain(fleet: Fleet) -> None:
    await stop([*fleet.gateways, *fleet.jobs], fleet.settings.graceful_termination_timeout)
    await stop([*fleet.batchers, *fleet.workers], SHORT_STOP_S)
    await stop(fleet.brokers, SHORT_STOP_S)
