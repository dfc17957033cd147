"""Gateways in processes of their own, without a launcher."""

import contextlib
import os
import subprocess
import sys
from functools import partial
from typing import Self

import httpx

from tests.support.forks.client import ForkedProcess
from tests.support.machine.ports import free_port
from tests.support.waiting import wait_until


def start(url: str, name: str, port: int, **variables: str) -> "subprocess.Popen[str]":
    own = {
        "PROCESS_NAME": name,
        "REDIS_URL": url,
        "PORT": str(port),
        "HOSTNAME": "127.0.0.1",
        "HEARTBEAT_S": "0.1",
        "PYTHONPATH": os.getcwd(),
        "WORKER_GRACE_S": "3600",  # a scripted worker shows itself once
    }
    environ = {key: value for key, value in os.environ.items() if key != "INCARNATION"} | own | variables
    return ForkedProcess([sys.executable, "-m", "api"], env=environ, stderr=subprocess.PIPE, text=True)


async def healthy(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        async with httpx.AsyncClient() as client:
            return (await client.get(f"{url}/health")).status_code == 200
    return False


class GatewayProcesses:
    """Gateways that share a port; each has one of its own beside it. `settings` are their variables."""

    def __init__(self, url: str, count: int = 2, **settings: str) -> None:
        self.port = free_port()
        ports = [free_port() for _ in range(count)]
        self.url = f"http://127.0.0.1:{self.port}"
        self.urls = [f"http://127.0.0.1:{port}" for port in ports]
        self.num_kills = 0
        self.starts = [
            partial(start, url, port=self.port, GATEWAY_PORT=str(port), **settings) for port in ports
        ]
        self.processes = [begin(name=f"g{place}") for place, begin in enumerate(self.starts)]

    async def until_healthy(self) -> None:
        for url in self.urls:
            await wait_until(lambda url=url: healthy(url))  # type: ignore[misc]

    def kill(self, place: int) -> None:
        """Kill a gateway and start it again."""
        end(self.processes[place])
        self.num_kills += 1
        self.processes[place] = self.starts[place](name=f"g{place}-{self.num_kills}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            end(process)


def end(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.communicate()
