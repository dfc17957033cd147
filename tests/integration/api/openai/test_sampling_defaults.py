"""The model's own sampling values: the defaults of requests on /v1, and of no others."""

from dataclasses import replace
from typing import Any

from deploy.launcher.embedded_broker import Broker
from tests.support.answers.openai_frames import CHAT
from tests.support.fleet.gateways import answering
from tests.support.fleet.scripted_worker import Answer

DEFAULTS = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_new_tokens": 5}
ROUTES: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", CHAT, "max_tokens"),
    ("/v1/completions", {"prompt": "Hi"}, "max_tokens"),
    ("/v1/responses", {"input": "Hi"}, "max_output_tokens"),
]


async def test_a_request_without_values_gets_the_model_s(broker: Broker) -> None:
    async with answering(broker.url, Answer([11])) as (worker, gateway, client):
        gateway.pool.tokenizer = replace(gateway.pool.tokenizer, sampling_defaults=DEFAULTS)

        async def seen(path: str, body: dict[str, Any]) -> tuple[Any, int]:
            assert (await client.post(path, json=body)).status_code == 200
            return worker.seen[-1].sampling, worker.seen[-1].stopping.max_new_tokens

        for path, body, length in ROUTES:
            sampling, most = await seen(path, body)
            assert (sampling.temperature, sampling.top_k, sampling.top_p, most) == (0.6, 20, 0.95, 5)
            own, most = await seen(path, body | {"temperature": 1.0, "top_k": 0, length: 3})
            assert (own.temperature, own.top_k, own.top_p, most) == (1.0, 0, 0.95, 3)
            _, most = await seen(path, body | {length: 50})
            assert most == 5, "as in vLLM, it is the most that a request gets"
        greedy, most = await seen(
            "/v1/chat/completions", CHAT | {"temperature": 0, "max_completion_tokens": 2}
        )
        assert (greedy, most) == (None, 2)
        plain, most = await seen("/generate", {"inputs": "Hi"})
        assert plain is None and most > 5, "TGI's routes keep TGI's defaults"
