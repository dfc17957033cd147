"""schemathesis, with its default checks, against the description of the API: what the description allows is
accepted, what it forbids is refused, and every answer is as described.
"""

import asyncio
import re
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance

from api.app import build
from api.inference.pool import Pool
from common.settings.settings import Settings
from deploy.serve.broker import Broker
from tests.support.fleet.gateways import model_tokenizer, ready, serving
from tests.support.fleet.scripted_worker import Answer, working
from tests.support.waiting import PATIENCE_S

TOKENIZER = model_tokenizer().backend
NUM_EXAMPLES = 10
NOT_SAID = re.compile(
    "Input should be a valid integer"  # JSON Schema takes 5.0 for one
    "|`(seed|truncate|truncate_prompt_tokens|min_new_tokens|min_tokens|top_n_tokens|top_logprobs|logprobs|best_of)` must be"
    "|supports up to|must be at most"  # limits of this fleet; and of seeds, 2**64-1 is no float
    "|tokens below|and below"
    "|has no tokens"
    # one field and another
    "|`stream_options` is only allowed with|`top_logprobs` needs|exclude each other|differ|`best_of`"
    "|`decoder_input_details` must be false when|`max_tokens` must be at least 1. Given: 0"
    "|does not exist"
    "|must have words of"
    "|chat_template_kwargs"
    "|list of lists of token ids"  # 5.0 again
)
"""Causes of a refusal that no description says: limits that depend on the fleet or on another field."""


async def document() -> Any:
    """What any gateway says of itself; no broker is asked."""
    app = build(Pool(Settings(redis_url="redis://127.0.0.1:1"), "g0-test", model_tokenizer()))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client:
        return (await client.get("/api-doc/openapi.json")).json()


schema = schemathesis.openapi.from_dict(asyncio.run(document()))


@pytest.fixture(scope="module")
def base_url(shared_broker: Broker) -> Iterator[str]:
    """A gateway with a fake worker, which serves in another thread: schemathesis blocks this one."""
    served, urls, ends = threading.Event(), list[str](), list[Any]()

    async def serve() -> None:
        over, loop = asyncio.Event(), asyncio.get_running_loop()
        async with (
            working(shared_broker.url, TOKENIZER, lambda _: Answer([5, 6])),
            serving(shared_broker.url) as (gateway, client),
        ):
            await ready(gateway)
            urls.append(str(client.base_url))
            ends.append(lambda: loop.call_soon_threadsafe(over.set))
            served.set()
            await over.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert served.wait(PATIENCE_S)
    yield urls[0]
    ends[0]()
    thread.join()


@schema.parametrize()
@settings(
    max_examples=NUM_EXAMPLES,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
def test_every_route_is_as_described(case: schemathesis.Case, base_url: str) -> None:
    response = case.call(base_url=base_url)
    excluded = []
    if response.status_code in (400, 422) and NOT_SAID.search(response.text):
        excluded.append(positive_data_acceptance)
    if (
        case.path == "/chat_tokenize"
    ):  # takes a whole chat, as TGI does, and looks only at what makes the prompt
        excluded.append(negative_data_rejection)
    case.validate_response(response, excluded_checks=excluded)
