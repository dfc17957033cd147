"""Startup: shows what a starting fleet waits for, and how to use it once it is ready."""

import asyncio
import contextlib
import itertools
import logging
import shutil
import sys
from collections.abc import Awaitable, Callable
from typing import TextIO

from redis.asyncio import Redis

from common.broker.client import ERRORS, broker_url, check_broker, connect
from common.broker.keys import Keys
from common.process.incarnations import first_incarnation
from common.settings.settings import SettingError, Settings
from deploy.serve import checks
from deploy.serve.fleet import LocalFleet

log = logging.getLogger(__name__)

POLL_S = 0.1
HEALTH_TIMEOUT_S = 2.0
SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
CLEAR = "\x1b[J"
"""Clears the terminal from the cursor on."""
UP = "\x1b[1A\r"
EXAMPLE = '{"inputs":"The sky is blue because","parameters":{"max_new_tokens":20}}'


class StartupLine:
    """What the start waits for: one moving line in a terminal, elsewhere a log line whenever it changes.

    The cursor stays on an empty line above the moving one. There the fleet's processes, which share the
    terminal, write their logs.
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
            self.stream.write(f"{CLEAR}\n{line[: columns - 1]}{UP}")
            self.stream.flush()
        elif text != self.text:
            log.info("waiting for %s", text)
        self.text = text

    def clear(self) -> None:
        if self.is_terminal:
            self.stream.write(CLEAR)
            self.stream.flush()


async def wait_until_ready(fleet: LocalFleet) -> bool:
    """Waits until the fleet can serve, and shows meanwhile what it waits for. Returns False where the fleet
    is stopped before.
    """
    clock = asyncio.get_running_loop().time
    started_s = clock()
    line = StartupLine(sys.stderr)
    async with connect(broker_url(fleet.settings)) as redis:
        try:
            while not await is_ready(fleet):
                if not all(process.should_run for process in fleet.ours):
                    return False
                line.show(await describe_wait(fleet, redis), clock() - started_s)
                await asyncio.sleep(POLL_S)
        finally:
            line.clear()
    return True


async def describe_wait(fleet: LocalFleet, redis: Redis) -> str:
    """What the start waits for: `w0 w1: loading smollm2`, by what the workers that are not ready say."""
    keys = Keys(fleet.settings.pool)
    workers: dict[str, list[str]] = {}
    try:
        async with redis.pipeline(transaction=False) as pipe:
            for worker in fleet.workers:
                pipe.exists(keys.worker(worker.incarnation))
                pipe.hget(keys.process("starting", worker.incarnation), "doing")
            pipe.exists(keys.batcher)
            pipe.zcard(keys.workers)
            *answers, is_led, num_workers = await pipe.execute()
    except ERRORS:
        return "the broker"
    for worker, is_ready, doing in zip(fleet.workers, answers[::2], answers[1::2], strict=True):
        if not is_ready:
            workers.setdefault(doing.decode() if doing else "starting", []).append(worker.name)
    if not workers:
        if not num_workers:
            return "a worker"
        return "the gateway" if is_led else "the batcher"
    return ", ".join(f"{' '.join(names)}: {doing}" for doing, names in workers.items())


async def is_ready(fleet: LocalFleet) -> bool:
    """Whether the fleet can do its part: with a gateway, answer; with workers alone, compute."""
    if fleet.gateways:
        return await is_healthy(fleet.settings)
    return not fleet.workers or await are_ready(fleet, "worker")


async def are_ready(fleet: LocalFleet, kind: str) -> bool:
    """Whether every worker, or gateway, that should run is ready; False where the broker does not answer."""
    running = {process.incarnation for process in fleet.ours if process.kind == kind and process.should_run}
    try:
        async with asyncio.timeout(HEALTH_TIMEOUT_S), connect(broker_url(fleet.settings)) as redis:
            return bool(running) and running <= await READY[kind](redis, Keys(fleet.settings.pool))
    except ERRORS:
        return False


async def ready_workers(redis: Redis, keys: Keys) -> set[str]:
    """Workers with a heartbeat, by the first incarnation of their process."""
    members = [member.decode() for member in await redis.zrange(keys.workers, 0, -1)]
    async with redis.pipeline(transaction=False) as pipe:
        for member in members:
            pipe.exists(keys.worker(member))
        found = await pipe.execute()
    return {first_incarnation(member) for member, is_there in zip(members, found, strict=True) if is_there}


async def ready_gateways(redis: Redis, keys: Keys) -> set[str]:
    """Gateways with a heartbeat: they have one as soon as they serve."""
    members = [member.decode().partition(":") for member in await redis.zrange(keys.processes, 0, -1)]
    return {name for kind, _, name in members if kind == "gateway"}


READY: dict[str, Callable[[Redis, Keys], Awaitable[set[str]]]] = {
    "worker": ready_workers,
    "gateway": ready_gateways,
}
"""Reads who is ready, by the kind of the process."""


async def wait_for_broker(settings: Settings) -> None:
    while True:
        with contextlib.suppress(SettingError):
            return await check_broker(broker_url(settings))
        await asyncio.sleep(POLL_S)


async def is_healthy(settings: Settings) -> bool:
    host, port = checks.local_address(settings)
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
    """Return the last lines of a start: the URLs of the fleet, and a first request."""
    url = checks.base_url(settings)
    return "\n".join(
        [
            f"Tokenfleet serves {settings.model_name} at {url}",
            f"  page: {url} (open it in a browser to chat, and to watch the fleet)",
            f"  docs: {url}/docs",
            f"  try:  curl -N {url}/generate_stream -H 'Content-Type: application/json' -d '{EXAMPLE}'",
        ]
    )
