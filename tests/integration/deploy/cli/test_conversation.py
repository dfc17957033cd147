"""A conversation outlives the gateway that answers it."""

import asyncio

import httpx
import pytest

from deploy.cli.chat import Conversation
from deploy.launcher.embedded_broker import Broker
from tests.integration.api.test_server import healthy, start
from tests.support.fleet.scripted_batcher import batching
from tests.support.fleet.scripted_worker import Answer, working
from tests.support.machine.ports import free_port
from tests.support.tokenizer import TOKENIZER, ids
from tests.support.waiting import wait_until

TEXT = "one two three four five six seven eight nine ten " * 6


@pytest.mark.slow
async def test_an_answer_goes_on_when_its_gateway_is_killed(broker: Broker) -> None:
    port, own = free_port(), [free_port(), free_port()]
    processes = {f"g{i}": start(broker, f"g{i}", port, GATEWAY_PORT=str(one)) for i, one in enumerate(own)}
    try:
        async with (
            working(broker.url, TOKENIZER, lambda _: Answer(ids(TEXT)), step_s=0.03) as worker,
            batching(broker.url),
        ):
            for one in own:
                await wait_until(lambda one=one: healthy(f"http://127.0.0.1:{one}"))  # type: ignore[misc]
            pieces: list[str] = []
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=90) as client:
                conversation = Conversation(client, {"model": "tgi"})
                sent = asyncio.create_task(asyncio.to_thread(conversation.send, "Count.", pieces.append))
                await wait_until(lambda: len(pieces) > 5)
                processes[worker.seen[0].gateway.split("-")[0]].kill()
                answer = await sent
        assert "".join(pieces) == answer.text == TEXT
        assert len(worker.seen) == 1
    finally:
        for process in processes.values():
            process.kill()
            process.communicate()
