"""REQUEST_TIMEOUT_S holds for all choices of a request, whether the fleet keeps it or not."""

import time
from typing import Any

import pytest

from api.streams import relay as relay_module
from common.messages.request import Generate
from deploy.launcher.embedded_broker import Broker
from tests.support.fleet.gateways import answering, nothing_left
from tests.support.fleet.scripted_worker import Answer
from tests.support.tokenizer import ids
from tests.support.waiting import wait_until

IDS = ids(" one two three four five six")
COMPLETION = {"prompt": "x", "n": 2, "max_tokens": 50, "temperature": 1.0}


def endless(_: Generate) -> Answer:
    """Answer with some tokens and no end: the scripted fleet keeps no deadlines."""
    return Answer(IDS, ends=False)


def first_only(request: Generate) -> Answer:
    return Answer(IDS, ends=request.request_id.endswith(".0"))


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_module, "AUDIT_S", 0.05)
    monkeypatch.setattr(relay_module, "LATE_S", 0.1)


@pytest.mark.parametrize(("answer", "streamed"), [(endless, True), (first_only, False)])
async def test_all_choices_end_with_a_timeout_and_are_cancelled(
    broker: Broker, answer: Any, streamed: bool
) -> None:
    async with answering(broker.url, answer, request_timeout_s=1) as (worker, gateway, client):
        response = await client.post("/v1/completions", json=COMPLETION | {"stream": streamed})
        assert "was not finished before its deadline" in response.text
        assert response.status_code == (200 if streamed else 408)
        await nothing_left(gateway, worker)


async def test_a_request_whose_keys_have_expired_is_told_that_it_timed_out(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This happens after a gateway stood still for longer than the deadline."""
    monkeypatch.setattr(relay_module, "LATE_S", 3600.0)
    async with answering(broker.url, endless, request_timeout_s=0.5) as (worker, gateway, client):
        async with client.stream(
            "POST", "/generate_stream", json={"inputs": "x", "parameters": {"max_new_tokens": 50}}
        ) as response:
            await wait_until(lambda: worker.live and gateway.pool.relay.streams)
            [stream] = gateway.pool.relay.streams.values()
            await wait_until(lambda: time.monotonic() > stream.deadline_s)
            await worker.redis.delete(worker.keys.request(stream.request.request_id))
            gateway.pool.relay.filler.request_fill([stream])
            content = (await response.aread()).decode()
        assert "was not finished before its deadline" in content and '"timeout"' in content
        await nothing_left(gateway, worker)
