"""A batch of many lines, whose gateways are killed again and again, has each line once."""

import asyncio
import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from openai import APIConnectionError, APIStatusError, AsyncOpenAI
from openai.types import Batch

from deploy.launcher.embedded_broker import Broker
from tests.integration.api.batches.test_batches import CHAT, ENDED, answer, chat_line, jsonl, openai_client
from tests.support.fleet.scripted_batcher import batching
from tests.support.fleet.scripted_worker import working
from tests.support.machine.killed_gateways import KilledGateways
from tests.support.tokenizer import TOKENIZER

NUM_LINES = int(os.environ.get("BATCH_LINES", "2000"))
NUM_KILLS = int(os.environ.get("BATCH_KILLS", "8"))
MAX_GATEWAY_MIB = 700
WINDOW: Any = "best_effort"


@pytest.mark.slow
@pytest.mark.timeout(3000)
async def test_each_line_is_once_in_the_output_whichever_gateway_is_killed(
    broker: Broker, tmp_path: Path
) -> None:
    """BATCH_LINES=50000 BATCH_KILLS=100 is the full size."""
    largest = [0]
    async with working(broker.url, TOKENIZER, answer, 0.002) as worker, batching(broker.url):
        pace, settings = NUM_LINES // (NUM_KILLS + 1), {"FILES_DIR": str(tmp_path)}
        gateways = KilledGateways(broker, pace, lambda: len(worker.seen), **settings)
        try:
            await gateways.until_healthy()
            batch = await made(gateways.urls[0])
            kills = asyncio.create_task(gateways.kill_in_turns(600))
            last = await when_ended(gateways, batch.id, largest)
            kills.cancel()
            await gateways.until_healthy()
            async with httpx.AsyncClient(base_url=gateways.urls[0], timeout=60) as http:
                output = (await openai_client(http).files.content(last.output_file_id or "")).text
        finally:
            gateways.stop()
    assert gateways.num_kills >= NUM_KILLS // 2
    numbers = [json.loads(line)["custom_id"] for line in output.splitlines()]
    assert numbers == [str(number) for number in range(NUM_LINES)]
    assert len({one.request_id for one in worker.seen}) == len(worker.seen) == NUM_LINES
    assert largest[0] < MAX_GATEWAY_MIB
    print(f"{NUM_LINES} lines, {gateways.num_kills} kills, gateways of at most {largest[0]} MiB")


async def made(url: str) -> Batch:
    content = jsonl(chat_line(number % 40) | {"custom_id": str(number)} for number in range(NUM_LINES))
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        client = openai_client(http)
        file = await client.files.create(file=("in.jsonl", content), purpose="batch")
        return await client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window=WINDOW)


async def when_ended(gateways: KilledGateways, batch_id: str, largest: list[int]) -> Batch:
    """The batch when it has ended, asked for at any gateway that lives. Notes the memory of the largest."""
    for url in asks(gateways):
        largest[0] = max(largest[0], *(resident_mib(process.pid) for process in gateways.processes))
        with contextlib.suppress(APIConnectionError, APIStatusError, httpx.TransportError):
            async with httpx.AsyncClient(base_url=url, timeout=5) as http:
                client: AsyncOpenAI = openai_client(http)
                if (batch := await client.batches.retrieve(batch_id)).status in ENDED:
                    assert batch.status == "completed", batch.errors
                    return batch
        await asyncio.sleep(0.2)
    raise AssertionError


def asks(gateways: KilledGateways) -> Iterator[str]:
    while True:
        yield from gateways.urls


def resident_mib(pid: int) -> int:
    with contextlib.suppress(psutil.Error):
        return int(psutil.Process(pid).memory_info().rss / 2**20)
    return 0
