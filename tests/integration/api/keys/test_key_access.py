"""API keys over HTTP: who may ask, for which model and route, and whose requests are whose."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from api.errors import ApiError
from api.http.key_ring import KeyRing
from api.lifecycle import Gateway
from common import api_keys
from common.api_keys import ApiKey, IssuedKey, digest_of
from common.settings.settings import SettingError, Settings
from deploy.launcher.embedded_broker import Broker
from tests.support.fleet.gateways import answering, ready, serving
from tests.support.fleet.scripted_worker import Answer, FakeWorker
from tests.support.keys.issued import add_key, bearer, client_of, gone, known, status
from tests.support.tokenizer import ids
from tests.support.waiting import wait_until

LONG = {"inputs": "a", "parameters": {"max_new_tokens": 900, "ignore_eos": True}}
CHAT = {
    "messages": [{"role": "user", "content": "Hi"}],
    "max_tokens": 900,
    "ignore_eos": True,
    "stream": True,
}
TEXTS = ids(" one two three") * 1000
REVOKED_S = 5.0


@pytest.fixture
async def acme(redis: Redis) -> IssuedKey:
    return await add_key(redis, tenant="acme", name="reports", service_class="batch", weight=2.5)


@pytest.fixture
async def served(
    broker: Broker, acme: IssuedKey
) -> AsyncIterator[tuple[FakeWorker, Gateway, httpx.AsyncClient]]:
    async with answering(broker.url, Answer(TEXTS), step_s=0.02, api_key="sesame") as found:
        yield found


async def test_only_keys_that_count_are_served(
    served: tuple[FakeWorker, Gateway, httpx.AsyncClient], acme: IssuedKey, redis: Redis
) -> None:
    worker, gateway, client = served
    old = await add_key(redis, expires_at=int(time.time()) - 1)
    await known([gateway], old)
    assert [await status(client, key) for key in (acme, "sesame", old, "wrong")] == [200, 200, 401, 401]
    assert (worker.seen[0].key_id, worker.seen[1].key_id) == (acme.record.key_id, "api_key")
    unnamed = await client.post("/v1/chat/completions", json=CHAT)
    assert unnamed.json()["error"]["code"] == "invalid_api_key"
    assert unnamed.headers["www-authenticate"] == "Bearer"
    expired = await client.post("/generate", json=LONG, headers=bearer(old))
    assert expired.json() == {
        "error": f"The API key {old.record.key_id} has expired",
        "error_type": "unauthorized",
    }
    for path in ("/health", "/livez", "/metrics", "/v1/models", "/info"):
        assert (await client.get(path)).status_code not in (401, 403), path


async def test_a_key_has_a_tenant_a_class_and_a_weight(
    served: tuple[FakeWorker, Gateway, httpx.AsyncClient], acme: IssuedKey
) -> None:
    worker, _, client = served
    await status(client, acme)
    request = worker.seen[-1]
    assert (request.tenant, request.class_name, request.weight) == ("acme", "batch", 2.5)
    other = {"x-tenant": "other", "x-priority": "interactive"}
    refused = await client.post("/generate", json=LONG, headers=bearer(acme) | other)
    assert (refused.status_code, "`x-tenant`" in refused.text) == (403, True)
    body = {"inputs": "a", "parameters": {"max_new_tokens": 1}}
    assert (await client.post("/generate", json=body, headers=bearer("sesame") | other)).status_code == 200
    assert (worker.seen[-1].tenant, worker.seen[-1].class_name) == ("other", "interactive")


async def test_a_key_may_use_its_models_and_no_route_of_admins(
    served: tuple[FakeWorker, Gateway, httpx.AsyncClient], acme: IssuedKey, redis: Redis
) -> None:
    _, gateway, client = served
    elsewhere, here = await add_key(redis, models=["llama"]), await add_key(redis, models=["smollm2"])
    await known([gateway], here)
    texts: dict[str, dict[str, Any]] = {
        "/generate": {"inputs": "a", "parameters": {"max_new_tokens": 1}},
        "/v1/completions": {"prompt": "a", "max_tokens": 1},
        "/v1/responses": {"input": "a", "max_output_tokens": 1},
        "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
        "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "a"}]},
        "/tokenize": {"inputs": "a"},
        "/detokenize": {"tokens": [1]},
        "/v2/models/smollm2/generate": {"text_input": "a", "parameters": {"max_new_tokens": 1}},
        "/vertex": {"instances": [{"inputs": "a", "parameters": {"max_new_tokens": 1}}]},
    }
    for path, body in texts.items():
        given = [(await client.post(path, json=body, headers=bearer(key))) for key in (elsewhere, here)]
        assert [one.status_code for one in given] == [403, 200], path
    error = (await client.post("/v1/completions", json={"prompt": "a"}, headers=bearer(elsewhere))).json()
    assert error["error"]["type"] == "permission_error" and error["error"]["param"] == "model"
    posts = ("/admin/jobs/a/retry", "/admin/webhooks/dead/retry", "/fleet/processes/a/kill")
    gets = ("/fleet", "/fleet/requests/a", "/admin/jobs/a", "/admin/jobs/a%23b")
    for method, path in (*(("GET", path) for path in gets), *(("POST", path) for path in posts)):
        assert (await client.request(method, path, headers=bearer(acme))).status_code == 403
        asked = await client.request(method, path, headers=bearer("sesame"))
        assert asked.status_code in (200, 404) or "DEMO" in asked.text


@pytest.mark.parametrize(("path", "body"), [("/generate_stream", LONG), ("/v1/chat/completions", CHAT)])
async def test_a_revoked_key_is_refused_at_all_gateways_and_its_streams_end(
    served: tuple[FakeWorker, Gateway, httpx.AsyncClient],
    broker: Broker,
    acme: IssuedKey,
    redis: Redis,
    path: str,
    body: dict[str, Any],
) -> None:
    worker, gateway, client = served
    async with serving(broker.url, name="g1-test", api_key="sesame") as (second, other):
        await ready(second)
        assert (await status(client, acme), await status(other, acme)) == (200, 200)
        reading = asyncio.create_task(other.post(path, json=body, headers=bearer(acme)))
        kept = await client.post(
            "/v1/responses", json={"input": "a", "background": True}, headers=bearer(acme)
        )
        own = await add_key(redis)
        await wait_until(lambda: len(worker.live) == 2)
        await api_keys.revoke_key(client_of(redis), acme.record.key_id)
        began_s = time.monotonic()
        await gone(gateway.keys, acme.record.key_id)
        await gone(second.keys, acme.record.key_id)
        assert time.monotonic() - began_s < REVOKED_S
        assert (await status(client, acme), await status(other, acme)) == (401, 401)
        answer = await reading
        last = json.loads([line for line in answer.text.splitlines() if line.startswith("data: {")][-1][6:])
        text = "Request failed during generation: its API key was revoked or has expired"
        error = last["error"]
        assert (error if isinstance(error, str) else error["message"]) == text
        await wait_until(lambda: not worker.live)  # also the one that nobody reads
        assert await status(client, own) == 200
        assert kept.status_code == 200


async def test_requests_and_responses_belong_to_their_tenant(
    served: tuple[FakeWorker, Gateway, httpx.AsyncClient], acme: IssuedKey, redis: Redis
) -> None:
    _, gateway, client = served
    colleague, stranger = await add_key(redis, tenant="acme"), await add_key(redis, tenant="other")
    await known([gateway], stranger)
    made = await client.post("/v1/responses", json={"input": "a", "background": True}, headers=bearer(acme))
    response_id = made.json()["id"]
    paths = (f"/v1/responses/{response_id}", f"/requests/{response_id.removeprefix('resp_')}")
    for path in paths:
        found = [
            (await client.get(path, headers=bearer(key))).status_code
            for key in (acme, colleague, "sesame", stranger)
        ]
        assert found == [200, 200, 200, 404], path
    again = {"input": "b", "previous_response_id": response_id}
    assert (await client.post("/v1/responses", json=again, headers=bearer(stranger))).status_code in (
        400,
        404,
    )
    assert (await client.delete(paths[1], headers=bearer(stranger))).status_code == 404
    assert (await client.delete(paths[0], headers=bearer(stranger))).status_code == 404
    assert (await client.delete(paths[1], headers=bearer(colleague))).status_code == 200


@pytest.mark.parametrize("is_used", [True, False])
def test_a_revoked_key_is_lost_although_the_clock_went_forward_and_back(is_used: bool) -> None:
    """So the requests end that were admitted since."""
    ring = KeyRing(Settings())
    key = ApiKey("k1", digest_of("k1"), expires_at=1000)
    ring.take([key])
    lost = []
    for now_s in (900, 8000, 900):
        ring.clock.note(now_s)
        lost.append(ring.take_time())
    if is_used:
        assert ring.find(b"k1") == key
    ring.take([replace(key, revoked=900)])
    assert [*lost, ring.take_time()] == [set(), {"k1"}, set(), {"k1"}]
    with pytest.raises(ApiError, match="revoked"):
        ring.find(b"k1")


async def test_without_keys_nobody_needs_one_and_with_the_first_everybody(
    broker: Broker, redis: Redis
) -> None:
    async with answering(broker.url, Answer([11])) as (worker, gateway, client):
        assert await status(client, "anything") == 200
        assert (worker.seen[-1].key_id, len(worker.seen[-1].tenant)) == ("", 16)
        own = await add_key(redis)
        await known([gateway], own)
        assert [await status(client, key) for key in (own, "anything")] == [200, 401]
        await redis.delete(client_of(redis).keys.api_keys)  # a broker that has lost all opens nothing
        await wait_until(lambda: not gateway.keys.by_id)
        assert await status(client, own) == 401


async def test_a_rotated_key_has_another_text_and_its_streams_go_on(
    served: tuple[FakeWorker, Gateway, httpx.AsyncClient], acme: IssuedKey, redis: Redis
) -> None:
    worker, gateway, client = served
    reading = asyncio.create_task(client.post("/generate_stream", json=LONG, headers=bearer(acme)))
    await wait_until(lambda: worker.live)
    rotated = await api_keys.rotate_key(client_of(redis), acme.record.key_id)
    await wait_until(lambda: gateway.keys.by_id[acme.record.key_id].digest == rotated.record.digest)
    assert [await status(client, key) for key in (rotated, acme)] == [200, 401]
    assert worker.live and not reading.done()
    reading.cancel()


# --- a file -------------------------------------------------------------------------------------------------


async def test_keys_in_a_file_count_and_are_read_again(broker: Broker, tmp_path: Path) -> None:
    path, key = tmp_path / "keys.yaml", "k" * 40
    entry = f"keys:\n- key_id: one\n  digest: {digest_of(key)}\n  tenant: acme\n"
    path.write_text(entry)
    async with answering(broker.url, Answer([11]), api_keys_file=str(path)) as (worker, gateway, client):
        assert [await status(client, sent) for sent in (key, "wrong")] == [200, 401]
        assert (worker.seen[-1].tenant, worker.seen[-1].key_id) == ("acme", "one")
        path.write_text(f"{entry}- key_id: two\n  key: {'z' * 16}\n")
        await wait_until(lambda: "two" in gateway.keys.active)
        assert await status(client, "z" * 16) == 200
        path.write_text("keys: [")
        await asyncio.to_thread(path.unlink)
        path.write_text("keys:\n- key_id: two\n  key: too short\n")
        assert await status(client, key) == 200
        path.write_text("keys: []")
        await wait_until(lambda: not gateway.keys.active)
        assert await status(client, key) == 401


async def test_a_gateway_does_not_start_with_a_faulty_file(broker: Broker, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"API_KEYS_FILE: .*keys\.yaml cannot be read: No such file"):
        async with serving(broker.url, api_keys_file=str(tmp_path / "keys.yaml")):
            pass
