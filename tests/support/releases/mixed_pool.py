"""A pool whose processes are of two releases, without launcher; its workers have no model."""

import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from benchmarks.client import EventReader, Stream
from tests.support.chaos.engine import STEP_MS, generate
from tests.support.machine.ports import free_port
from tests.support.tokenizer import ids
from tests.support.waiting import wait_until

MODULES = {"gateway": "api", "batcher": "batcher", "worker": "tests.support.chaos.worker"}
SETTINGS = {"HEARTBEAT_S": "0.2", "WORKER_TTL_S": "2", "HOSTNAME": "127.0.0.1", "MAX_BATCH_SIZE": "32"}


@dataclass
class MixedPool:
    """Processes of one pool. `release` of each is the root of its files.

    Attributes:
        other_port: of the second gateway, `g1`, if there is one.
        running: processes by name.
    """

    url: str
    pool: str
    step_ms: int
    port: int = field(default_factory=free_port)
    other_port: int = field(default_factory=free_port)
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, kind: str, name: str, release: Path, **settings: str) -> None:
        port = self.other_port if name == "g1" else self.port
        own = {"REDIS_URL": self.url, "POOL": self.pool, "PORT": str(port), STEP_MS: str(self.step_ms)}
        names = {"PROCESS_NAME": name, "PARENT_PID": str(os.getpid()), "PYTHONPATH": str(release)}
        command = [sys.executable, "-P", "-m", MODULES[kind]]
        self.running[name] = subprocess.Popen(
            command, env=os.environ | SETTINGS | own | names | settings, cwd=release, stdin=subprocess.DEVNULL
        )

    def kill(self, name: str) -> None:
        process = self.running.pop(name)
        process.kill()
        process.wait()

    async def processes(self) -> list[dict[str, Any]]:
        """What the gateway says of all processes, once it serves."""
        with contextlib.suppress(httpx.TransportError):
            async with httpx.AsyncClient(base_url=self.base_url) as client:
                if (await client.get("/health")).status_code == 200:
                    return [*(await client.get("/fleet")).json()["processes"]]
        return []

    async def ready(self, num_workers: int) -> None:
        """Wait until the gateway serves and this many workers do: one that only starts is listed, too, and a
        signal would end it at once.
        """

        async def is_ready() -> bool:
            found = [one for one in await self.processes() if one["kind"] == "worker"]
            return [one["state"] for one in found].count("ready") == num_workers

        await wait_until(is_ready)

    async def stands_by(self, name: str) -> None:
        """Wait until a batcher has a heartbeat."""

        async def is_there() -> bool:
            return any(one["id"].startswith(f"{name}-") for one in await self.processes())

        await wait_until(is_there)

    async def ask(self, prompt: str, num_tokens: int, answer: Stream) -> None:
        """Ask, and come back after each third of the answer, to the other gateway if there is one."""
        body = {"inputs": prompt, "parameters": {"max_new_tokens": num_tokens}, "resume_s": 60}
        ports = cycle((self.port, self.other_port) if "g1" in self.running else (self.port,))
        reader = EventReader(self.base_url)
        frames = reader.post("/generate_stream", body)
        while len(answer.frames) < num_tokens:
            reader.url = urlsplit(f"http://127.0.0.1:{next(ports)}")
            async for frame in frames:
                answer.frames.append(frame)
                if len(answer.frames) % (num_tokens // 3) == 0:
                    break
            frames = reader.go_on()


@contextlib.asynccontextmanager
async def mixed_pool(url: str, pool: str, step_ms: int) -> AsyncIterator[MixedPool]:
    """A pool without processes; those that are started are killed at the end."""
    mixed = MixedPool(url, pool, step_ms)
    try:
        yield mixed
    finally:
        for name in [*mixed.running]:
            mixed.kill(name)


def expected_ids(prompt: str, num_tokens: int) -> list[int]:
    """Return what workers without a model answer."""
    return generate(ids(prompt), num_tokens)
