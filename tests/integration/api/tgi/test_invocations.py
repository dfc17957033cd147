"""POST /invocations: each body is answered as by the route that it is meant for."""

from typing import Any

from deploy.launcher.embedded_broker import Broker
from tests.support.answers.openai_frames import CHAT, frames, streamed
from tests.support.fleet.gateways import answering, nothing_left
from tests.support.fleet.scripted_worker import Answer
from tests.support.sse import data_of
from tests.support.tokenizer import ids

PATH = "/invocations"


async def test_each_body_is_answered_as_by_its_route(broker: Broker) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/": {"inputs": "Hi"},
        "/v1/chat/completions": CHAT,
        "/v1/completions": {"prompt": "Hi"},
    }
    async with answering(broker.url, Answer(ids("one two"))) as (worker, gateway, client):

        async def answer(path: str, body: dict[str, Any]) -> Any:
            found = (await client.post(path, json=body)).json()
            return found if isinstance(found, list) else found["choices"]

        for path, body in bodies.items():
            assert await answer(PATH, body) == await answer(path, body)
        chunks = frames(await streamed(client, PATH, CHAT))
        assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == "one two"
        assert data_of(await streamed(client, PATH, {"inputs": "Hi"}))
        wrong = await client.post(PATH, json={"prompt": ""})
        empty = await client.post(PATH, json={})
        await nothing_left(gateway, worker)
    assert (wrong.status_code, wrong.json()["error_type"]) == (422, "validation")
    assert (empty.status_code, "`inputs`" in empty.json()["error"]) == (422, True)


async def test_a_wrong_key_and_a_large_body_are_refused(broker: Broker) -> None:
    async with answering(broker.url, Answer([11]), api_key="sesame", payload_limit=100) as (_, _, client):
        assert (await client.post(PATH, json=CHAT)).status_code == 401
        client.headers["authorization"] = "Bearer sesame"
        assert (await client.post(PATH, json=CHAT)).status_code == 200
        assert (await client.post(PATH, json={"prompt": "x" * 100})).status_code == 413
