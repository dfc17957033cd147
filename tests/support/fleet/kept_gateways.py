"""Gateways in processes of their own, whose sockets a keeper in this process keeps, as the launcher does."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import patch

import httpx
import uvicorn

from api.app import Gateway, GatewayServer, build, build_heir, own_listener
from api.handover.answer_socket import KeeperChannel
from api.handover.draining import Draining
from api.http.protocol import HttpProtocol
from common.settings.settings import Settings
from deploy.launcher.launcher import command
from deploy.launcher.process import SupervisedProcess
from deploy.launcher.socket_keeper import SocketKeeper
from tests.support.fleet.gateways import SETTINGS, ready
from tests.support.forks.client import create_subprocess_exec
from tests.support.machine.ports import free_port
from tests.support.tokenizer import model_tokenizer
from tests.support.waiting import wait_until


class KeptGateways:
    """Supervised gateways that share a port; each that ends is started again."""

    def __init__(self, redis_url: str, count: int, **variables: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.keeper = SocketKeeper(orphan_s=3600.0)  # a gateway may start for long on a busy machine
        own = {
            "REDIS_URL": redis_url,
            "HOSTNAME": "127.0.0.1",
            "PORT": str(self.port),
            "PYTHONPATH": os.getcwd(),
        }
        environ = own | {"HEARTBEAT_S": "0.05", "WORKER_GRACE_S": "3600"} | variables
        self.processes = [
            SupervisedProcess(
                "gateway", f"g{i}", command("api"), environ, open_channel=self.keeper.open_channel
            )
            for i in range(count)
        ]
        self.num_kills = 0

    async def supervise(self, process: SupervisedProcess) -> None:
        while process.should_run:
            await process.run_once()

    async def all_ready(self) -> None:
        """Returns when every gateway takes answers of others, and all accept requests."""
        await wait_until(lambda: sum(one.takes for one in self.keeper.channels) == len(self.processes))

        async def healthy() -> bool:
            with contextlib.suppress(httpx.TransportError):
                async with httpx.AsyncClient() as http:
                    return (await http.get(f"{self.url}/health")).status_code == 200
            return False

        await wait_until(healthy)

    async def end(self, process: SupervisedProcess, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to a gateway; returns when its successor runs."""
        assert process.running is not None
        pid = process.running.pid
        process.send(number)
        self.num_kills += 1
        await wait_until(lambda: process.running is not None and process.running.pid != pid)


@contextlib.asynccontextmanager
async def kept_gateways(redis_url: str, count: int, **variables: Any) -> AsyncIterator[KeptGateways]:
    gateways = KeptGateways(redis_url, count, **variables)
    with patch.object(asyncio, "create_subprocess_exec", create_subprocess_exec):
        tasks = [asyncio.create_task(gateways.supervise(process)) for process in gateways.processes]
        try:
            await gateways.all_ready()
            yield gateways
        finally:
            gateways.keeper.close()
            for process in gateways.processes:
                process.should_run = False
                process.kill()
            await asyncio.gather(*tasks)


@contextlib.asynccontextmanager
async def keeping(
    redis_url: str, keeper: SocketKeeper, name: str
) -> AsyncIterator[tuple[GatewayServer, int]]:
    """A gateway in this process whose sockets are kept, and its port."""
    gateway = Gateway(Settings(redis_url=redis_url, **SETTINGS), name, model_tokenizer())
    channel, draining, listener = KeeperChannel(keeper.open_channel()), Draining(), own_listener(0)
    config = uvicorn.Config(build(gateway, draining, channel), log_config=None, http=HttpProtocol)
    server = GatewayServer(config, draining, 60, channel)
    server.heir_app = build_heir(gateway, channel)
    port: int = listener.getsockname()[1]
    task = asyncio.create_task(server.serve([listener]))
    await wait_until(lambda: server.started or task.done())
    await ready(gateway)
    try:
        yield server, port
    finally:
        server.should_exit = True
        server.signalled.set()
        await task
