"""schemathesis, with its default checks, against the OpenAPI document: what it allows is accepted, what it
forbids is refused, and every response is as described.
"""

import asyncio
import re
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.core.result import Ok
from schemathesis.generation.hypothesis.builder import HypothesisTestConfig, HypothesisTestMode, create_test
from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance

from api.app import build
from api.lifecycle import Gateway
from common.messages.request import Generate
from common.settings.settings import Settings
from deploy.serve.embedded_broker import Broker
from tests.support.fleet.gateways import answering
from tests.support.fleet.scripted_batcher import batching
from tests.support.fleet.scripted_worker import Answer
from tests.support.tokenizer import model_tokenizer
from tests.support.waiting import PATIENCE_S

SETTINGS = settings(
    max_examples=10, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)
MODES = list(HypothesisTestMode)
UNCOVERED = [HypothesisTestMode.EXAMPLES, HypothesisTestMode.FUZZING]
TWINS = ("/", "/generate_stream", "/invocations", "/vertex", "/chat_tokenize")
"""Routes that take the body of another: not each of its fields is tried at each of its limits."""
UNKNOWN_HEADER = "x-schemathesis-unknown-property"
UNDESCRIBED = re.compile(
    "Input should be a valid integer"  # JSON Schema takes 5.0 for one
    "|`(seed|truncate|truncate_prompt_tokens|min_new_tokens|min_tokens)` must be"
    "|`(top_n_tokens|top_logprobs|prompt_logprobs|logprobs|best_of)` must be"
    "|supports up to|must be at most"  # limits of this fleet; and of seeds, 2**64-1 is no float
    "|tokens below|and below"
    "|has no tokens"
    # one field and another
    "|`stream_options` is only allowed with|`top_logprobs` needs|exclude each other|differ|`best_of`"
    "|`decoder_input_details` must be false when|`max_tokens` must be at least 1. Given: 0"
    "|is only allowed with `tools`|the name .* twice"
    "|`prompt_logprobs` must be 0 when|has no token that may come before"
    "|each instance has one prediction|`stream` must be false"
    "|messages.[0-9]+..content` is required|is for the role `assistant`"
    "|does not exist"
    "|must have words of"
    "|chat_template_kwargs"
    "|list of lists of token ids"  # 5.0 again
    "|cannot be compiled|must be a JSON schema|must be a text that is not empty"  # grammars
    "|`(grammar|response_format)[a-z_.]*` is required"
    "|[Pp]revious response with id|`background` (needs|waits)"
    "|`(detached|resume_s)` needs a stream|`detached` waits for no client"
)
"""Errors that a JSON schema cannot describe: limits that depend on the fleet or on another field."""


async def document() -> Any:
    """The OpenAPI document of a gateway; it needs no broker."""
    app = build(Gateway(Settings(redis_url="redis://127.0.0.1:1"), "g0-test", model_tokenizer()))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client:
        return (await client.get("/api-doc/openapi.json")).json()


def answer(request: Generate) -> Answer:
    """Three tokens, or as many as the request allows where the end-of-sequence token does not end it."""
    return Answer([5, 6] * (request.stopping.max_new_tokens if request.stopping.ignore_eos else 1))


@pytest.fixture(scope="module")
def base_url(shared_broker: Broker) -> Iterator[str]:
    """A gateway with a fake worker. It serves in another thread, because schemathesis blocks this one."""
    started, urls, stops = threading.Event(), list[str](), list[Any]()

    async def serve() -> None:
        stopped, loop = asyncio.Event(), asyncio.get_running_loop()
        async with batching(shared_broker.url), answering(shared_broker.url, answer) as (_, _, client):
            urls.append(str(client.base_url))
            stops.append(lambda: loop.call_soon_threadsafe(stopped.set))
            started.set()
            await stopped.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert started.wait(PATIENCE_S)
    yield urls[0]
    stops[0]()
    thread.join()


@pytest.mark.parametrize(
    "modes_of_twins", [UNCOVERED, pytest.param(MODES, marks=pytest.mark.slow)], ids=["", "all"]
)
def test_every_route_is_as_described(
    base_url: str, modes_of_twins: list[HypothesisTestMode], subtests: pytest.Subtests
) -> None:
    """Cases are made here rather than at collection: seconds, in each of the processes that collect."""
    schema = schemathesis.openapi.from_dict(asyncio.run(document()))
    num_cases = Counter[str]()

    def check(case: schemathesis.Case[Any]) -> None:
        num_cases[case.path] += 1
        response = case.call(base_url=base_url, session=session)
        case.validate_response(response, excluded_checks=excluded_checks(case, response))

    with requests.Session() as session:
        session.trust_env = False  # neither proxies nor .netrc are looked for, six files a request
        for found in schema.get_all_operations():
            assert isinstance(found, Ok), found
            operation = found.ok()
            modes = modes_of_twins if operation.path in TWINS else MODES
            config = HypothesisTestConfig(schema.config, modes, settings=SETTINGS)
            with subtests.test(operation.label):
                create_test(operation=operation, test_func=check, config=config)()
                assert num_cases[operation.path]


def excluded_checks(case: schemathesis.Case[Any], response: schemathesis.Response) -> list[Any]:
    excluded = []
    if response.status_code in (400, 422) and UNDESCRIBED.search(response.text):
        excluded.append(positive_data_acceptance)
    if case.path == "/chat_tokenize":  # takes a whole chat, as TGI does; checks only what makes the prompt
        excluded.append(negative_data_rejection)
    if UNKNOWN_HEADER in (case.headers or {}):  # headers that a route does not name are none of its business
        excluded.append(negative_data_rejection)
    return excluded
