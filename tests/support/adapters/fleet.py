"""A scripted worker that follows the registry of adapters, and a gateway."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx

from api.app import Gateway
from common.adapter_registry import read_registry
from common.adapters import HeldAdapters
from common.broker.pool_client import PoolClient
from tests.support.fleet.gateways import ready, serving
from tests.support.fleet.scripted_worker import Answer, FakeWorker
from tests.support.tokenizer import TOKENIZER, ids

LOOK_S = 0.01


class AdapterWorker(FakeWorker):
    """Loads what the registry has.

    Attributes:
        refuses: name of an adapter → why it is refused.
        may_load: it loads nothing before this is set.
    """

    held = HeldAdapters()

    def __init__(self, url: str, pool: str = "default") -> None:
        super().__init__(url, TOKENIZER, lambda _: Answer(ids(" one")), pool=pool)
        self.refuses: dict[str, str] = {}
        self.may_load = asyncio.Event()
        self.may_load.set()

    async def follow(self) -> None:
        client = PoolClient(self.redis, self.keys)
        while True:
            registry = await read_registry(client)
            await self.may_load.wait()
            wanted = registry.adapters.values()
            held = HeldAdapters(
                [one.key for one in wanted if one.name not in self.refuses],
                [
                    (one.key, one.added_ms, self.refuses[one.name])
                    for one in wanted
                    if one.name in self.refuses
                ],
            )
            if held != self.held:
                self.held = held
                await self.announce()
            await asyncio.sleep(LOOK_S)


@contextlib.asynccontextmanager
async def following(url: str, answers: bool = True, pool: str = "default") -> AsyncIterator[AdapterWorker]:
    """A worker that is ready and loads adapters while the context is open. One that `answers` takes all
    requests, so there can be only one such worker.
    """
    worker = AdapterWorker(url, pool)
    await worker.open()
    loops = [worker.follow(), *([worker.run()] if answers else [])]
    tasks = [asyncio.create_task(loop) for loop in loops]
    try:
        yield worker
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await worker.close()


@contextlib.asynccontextmanager
async def adapter_fleet(
    url: str, **settings: Any
) -> AsyncIterator[tuple[AdapterWorker, Gateway, httpx.AsyncClient]]:
    """Such a worker, a gateway at which everybody may load adapters, and a client."""
    allowed = {"allow_runtime_lora_updating": True} | settings
    async with following(url) as worker, serving(url, **allowed) as (gateway, client):
        await ready(gateway)
        yield worker, gateway, client


async def load(client: httpx.AsyncClient, name: str, path: object, **fields: Any) -> httpx.Response:
    body = {"lora_name": name, "lora_path": str(path), **fields}
    return await client.post("/v1/load_lora_adapter", json=body)
