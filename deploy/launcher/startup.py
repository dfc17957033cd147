"""Startup: waits until a fleet is ready, and shows what it waits for and how to use it then."""

import asyncio
import contextlib
import itertools
import logging
import shutil
import sys
from typing import TextIO

from common.broker.client import ERRORS, broker_url, check_broker
from common.broker.pool_client import PoolClient
from common.process.logs import first_incarnation
from common.settings.settings import SettingError, Settings
from deploy.launcher import prepare
from deploy.launcher.fleet import LocalFleet

log = logging.getLogger(__name__)

POLL_S = 0.1
HEALTH_TIMEOUT_S = 2.0
SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
CLEAR = "\x1b[J"
"""Clears the terminal from the cursor on."""
CURSOR_UP = "\x1b[1A\r"
EXAMPLE = '{"inputs":"The sky is blue because","parameters":{"max_new_tokens":20}}'


class StartupLine:
    """Shows what the start waits for: in a terminal one moving line, elsewhere a log line at each change.

    The cursor stays on an empty line above the moving one, where the fleet's processes write their logs: they
    share the terminal.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.is_terminal = stream.isatty()
        self.text = ""
        self.frames = itertools.cycle(SPINNER)

    def show(self, text: str, waited_s: float) -> None:
        if self.is_terminal:
            line = f"{next(self.frames)} {text} · {waited_s:.0f} s"
            columns = shutil.get_terminal_size().columns
            self.stream.write(f"{CLEAR}\n{line[: columns - 1]}{CURSOR_UP}")
            self.stream.flush()
        elif text != self.text:
            log.info("waiting for %s", text)
        self.text = text

    def clear(self) -> None:
        if self.is_terminal:
            self.stream.write(CLEAR)
            self.stream.flush()


async def wait_until_ready(fleet: LocalFleet) -> bool:
    """Wait until the fleet can serve, and show what it waits for. Returns False if it is stopped before."""
    clock = asyncio.get_running_loop().time
    started_s = clock()
    line = StartupLine(sys.stderr)
    last: dict[str, str] = {}
    async with PoolClient.connect(fleet.settings) as pool:
        try:
            while not await is_ready(fleet):
                if not all(process.should_run for process in fleet.ours):
                    return False
                line.show(await describe_wait(fleet, pool, last), clock() - started_s)
                await asyncio.sleep(POLL_S)
        finally:
            line.clear()
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
    """Whether every process of this kind (`worker` or `gateway`) that should run has a ready heartbeat. False
    if the broker does not answer.
    """
    running = {process.incarnation for process in fleet.ours if process.kind == kind and process.should_run}
    try:
        async with asyncio.timeout(HEALTH_TIMEOUT_S), PoolClient.connect(fleet.settings) as own:
            ready: set[str] = set()
            for pool in map(own.of_pool, fleet.settings.pools):
                ready |= {*(await (ready_workers(pool) if kind == "worker" else pool.processes(kind)))}
            return bool(running) and running <= ready
    except ERRORS:
        return False


async def ready_workers(pool: PoolClient) -> list[str]:
    """First incarnations of the workers that have a heartbeat."""
    found = (await pool.look_at_workers([], ["state"])).heartbeats
    return [first_incarnation(name) for name, (state,) in found.items() if state is not None]


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
    have the key itself.
    """
    url = prepare.base_url(settings)
    key = ' -H "Authorization: Bearer $API_KEY"' if settings.api_key else ""
    return "\n".join(
        [
            f"Tokenfleet serves {settings.model_name} at {url}",
            f"  page: {url} (open it in a browser to chat, and to watch the fleet)",
            f"  docs: {url}/docs",
            f"  try:  curl -N {url}/generate_stream{key} -H 'Content-Type: application/json' -d '{EXAMPLE}'",
        ]
    )
