"""POST /tokenize in vLLM's shape, POST /detokenize and GET /version."""

from importlib.metadata import version
from typing import Any

from deploy.launcher.embedded_broker import Broker
from tests.support.fleet.gateways import answering, serving
from tests.support.fleet.scripted_worker import Answer
from tests.support.tokenizer import TOKENIZER, ids

TEXT = "Hé 🙂 wörld"


async def test_the_tokens_of_a_prompt_and_of_a_chat_in_vllm_s_shape(broker: Broker) -> None:
    async with answering(broker.url, Answer([11])) as (_, gateway, client):
        longest = gateway.pool.workers.limits.max_total_tokens
        bare = (await client.post("/tokenize", json={"prompt": TEXT, "model": "smollm2"})).json()
        body = {"prompt": TEXT, "return_token_strs": True, "add_special_tokens": False}
        full = (await client.post("/tokenize", json=body)).json()
        chat: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
        of_chat = (await client.post("/tokenize", json=chat)).json()
        templated = (await client.post("/chat_tokenize", json=chat)).json()
        continued = chat | {"continue_final_message": True, "add_generation_prompt": True}
        refused = await client.post("/tokenize", json=continued)
        unknown = await client.post("/tokenize", json={"prompt": TEXT, "model": "gpt-5"})
    assert bare == {
        "count": len(ids(TEXT)),
        "max_model_len": longest,
        "tokens": ids(TEXT),
        "token_strs": None,
    }
    assert full["token_strs"] == TOKENIZER.encode(TEXT, add_special_tokens=False).tokens
    assert of_chat["tokens"] == [token["id"] for token in templated["tokenize_response"]]
    assert (refused.status_code, unknown.status_code) == (422, 404)


async def test_detokenize_gives_the_text_back(broker: Broker) -> None:
    """No worker is needed; special tokens are included."""
    text = f"<|im_start|>user\n{TEXT}<|im_end|>"
    async with serving(broker.url) as (_, client):
        tokens = (await client.post("/tokenize", json={"prompt": text})).json()
        assert tokens["max_model_len"] is None
        back = await client.post("/detokenize", json={"tokens": tokens["tokens"]})
        wrong = await client.post("/detokenize", json={"tokens": [1, 10**9]})
    assert back.json() == {"prompt": text}
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "tokens")


async def test_version_and_openapi_stand_where_vllm_has_them(broker: Broker) -> None:
    async with serving(broker.url, api_key="sesame") as (_, client):
        assert (await client.get("/version")).json() == {"version": version("tokenfleet")}
        document = (await client.get("/openapi.json")).json()
        assert document == (await client.get("/api-doc/openapi.json")).json()
