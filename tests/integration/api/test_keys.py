"""API keys over HTTP and for jobs: who may ask, for what and how much, whose requests are whose, and how
admins manage keys.
"""

import asyncio
import json
import re
import time
from base64 import b64encode
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from api.app import Gateway
from api.errors import ApiError
from api.http.auth import KeyRing
from api.requests.pool import limit_headers
from api.requests.request_scripts import LeftOfRates
from common import api_keys
from common.api_keys import ApiKey, IssuedKey, digest_of
from common.settings.settings import SettingError, Settings
from deploy.cli import admin
from deploy.launcher.embedded_broker import Broker
from tests.integration.api.test_resume import two_gateways
from tests.support.broker_state import KEYS
from tests.support.fleet.gateways import answering, ready, serving
from tests.support.fleet.scripted_worker import Answer, FakeWorker, working
from tests.support.jobs import CHAT, TEXT, Service, answer, running_gateway
from tests.support.keys.issued import add_key, bearer, client_of, gone, known, status
from tests.support.tokenizer import TOKENIZER, ids
from tests.support.waiting import wait_for, wait_until

LONG = {"inputs": "a", "parameters": {"max_new_tokens": 900, "ignore_eos": True}}
STREAMED_CHAT = {
    "messages": [{"role": "user", "content": "Hi"}],
    "max_tokens": 900,
    "ignore_eos": True,
    "stream": True,
}
TEXTS = ids(" one two three") * 1000
REVOKED_S = 5.0
Served = tuple[FakeWorker, Gateway, httpx.AsyncClient]


@pytest.fixture
async def acme(redis: Redis) -> IssuedKey:
    return await add_key(redis, tenant="acme", name="reports", service_class="batch", weight=2.5)


@pytest.fixture
async def served(broker: Broker, acme: IssuedKey) -> AsyncIterator[Served]:
    async with answering(broker.url, Answer(TEXTS), step_s=0.02, api_key="sesame") as found:
        yield found


async def test_only_keys_that_count_are_served(served: Served, acme: IssuedKey, redis: Redis) -> None:
    worker, gateway, client = served
    old = await add_key(redis, expires_at=int(time.time()) - 1)
    await known([gateway], old)
    assert [await status(client, key) for key in (acme, "sesame", old, "wrong")] == [200, 200, 401, 401]
    assert (worker.seen[0].key_id, worker.seen[1].key_id) == (acme.record.key_id, "api_key")
    unnamed = await client.post("/v1/chat/completions", json=STREAMED_CHAT)
    assert unnamed.json()["error"]["code"] == "invalid_api_key"
    assert unnamed.headers["www-authenticate"] == "Bearer"
    expired = await client.post("/generate", json=LONG, headers=bearer(old))
    assert expired.json() == {
        "error": f"The API key {old.record.key_id} has expired",
        "error_type": "unauthorized",
    }
    open_to_all = ("/health", "/ping", "/livez", "/", "/metrics", "/docs", "/api-doc/openapi.json", "/info")
    for path in (*open_to_all, "/v1/models", "/v2", "/v2/health/live", "/v2/models/tgi"):
        assert (await client.get(path)).status_code not in (401, 403), path


async def test_a_key_has_a_tenant_a_class_and_a_weight(served: Served, acme: IssuedKey) -> None:
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
    served: Served, acme: IssuedKey, redis: Redis
) -> None:
    _, gateway, client = served
    elsewhere, here = await add_key(redis, models=["llama"]), await add_key(redis, models=["smollm2"])
    await known([gateway], here)
    texts: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "a", "max_tokens": 1},
        "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "a"}]},
        "/tokenize": {"inputs": "a"},
        "/detokenize": {"tokens": [1]},
    }
    for path, body in texts.items():
        given = [(await client.post(path, json=body, headers=bearer(key))) for key in (elsewhere, here)]
        assert [one.status_code for one in given] == [403, 200], path
    error = (await client.post("/v1/completions", json={"prompt": "a"}, headers=bearer(elsewhere))).json()
    assert error["error"]["type"] == "permission_error" and error["error"]["param"] == "model"
    posts = ("/admin/jobs/a/retry", "/admin/webhooks/dead/retry", "/fleet/processes/a/kill")
    gets = ("/fleet", "/fleet/requests/a", "/admin/jobs/a", "/admin/jobs/a%23b", "/admin/keys")
    for method, path in (*(("GET", path) for path in gets), *(("POST", path) for path in posts)):
        assert (await client.request(method, path, headers=bearer(acme))).status_code == 403
        asked = await client.request(method, path, headers=bearer("sesame"))
        assert asked.status_code in (200, 404) or "DEMO" in asked.text
        assert (await client.request(method, path)).status_code == 401
    access = [
        (await client.get("/page/access", headers=key)).json()["status"] for key in (bearer(acme), ADMIN, {})
    ]
    assert access == [403, 200, 401]


@pytest.mark.parametrize(
    ("path", "body"), [("/generate_stream", LONG), ("/v1/chat/completions", STREAMED_CHAT)]
)
async def test_a_revoked_key_is_refused_at_all_gateways_and_its_streams_end(
    served: Served,
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
    served: Served, acme: IssuedKey, redis: Redis
) -> None:
    _, gateway, client = served
    colleague, stranger = await add_key(redis, tenant="acme"), await add_key(redis, tenant="other")
    await known([gateway], stranger)
    made = await client.post("/v1/responses", json={"input": "a", "background": True}, headers=bearer(acme))
    response_id = made.json()["id"]
    response = f"/v1/responses/{response_id}"
    paths = (response, f"/requests/{response_id.removeprefix('resp_')}", f"{response}/input_items")
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
    ring = KeyRing(Settings(api_key="sesame"), lambda _: None)
    assert ring.find(b"sesame").admin, "API_KEY is never lost"
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
    served: Served, acme: IssuedKey, redis: Redis
) -> None:
    worker, gateway, client = served
    reading = asyncio.create_task(client.post("/generate_stream", json=LONG, headers=bearer(acme)))
    await wait_until(lambda: worker.live)
    rotated = await api_keys.rotate_key(client_of(redis), acme.record.key_id)
    await wait_until(lambda: gateway.keys.by_id[acme.record.key_id].digest == rotated.record.digest)
    assert [await status(client, key) for key in (rotated, acme)] == [200, 401]
    assert worker.live and not reading.done()
    reading.cancel()


# --- over HTTP ----------------------------------------------------------------------------------------------

ADMIN = bearer("sesame")


async def test_an_admin_manages_keys(broker: Broker) -> None:
    async with answering(broker.url, Answer([11]), api_key="sesame") as (_, gateway, client):
        made = await client.post("/admin/keys", json={"name": "reports", "tenant": "acme"}, headers=ADMIN)
        key = made.json()
        assert made.headers["cache-control"] == "no-store" and key["key"].startswith("tf-")
        await wait_until(lambda: key["key_id"] in gateway.keys.active)
        assert await status(client, key["key"]) == 200
        rotated = (await client.post(f"/admin/keys/{key['key_id']}/rotate", headers=ADMIN)).json()
        listed = (await client.get("/admin/keys", headers=ADMIN)).json()["keys"]
        assert listed == [{name: value for name, value in rotated.items() if name != "key"}]
        assert (listed[0]["tenant"], listed[0]["state"], listed[0]["name"]) == ("acme", "active", "reports")
        hook = {"webhook": "https://10.0.0.1/", "webhook_secret": f"whsec_{b64encode(bytes(24)).decode()}"}
        refused = await client.post("/admin/keys", json=hook, headers=ADMIN)
        assert refused.status_code == 422 and "`webhook` is at 10.0.0.1" in refused.json()["error"]
        assert "digest" not in listed[0] and rotated["key"] != key["key"]
        revoked = (await client.post(f"/admin/keys/{key['key_id']}/revoke", headers=ADMIN)).json()
        assert revoked["state"] == "revoked"
        await gone(gateway.keys, key["key_id"])
        assert await status(client, rotated["key"]) == 401
        assert (await client.post(f"/admin/keys/{key['key_id']}/rotate", headers=ADMIN)).status_code == 409
        assert (await client.post("/admin/keys/none/revoke", headers=ADMIN)).status_code == 404
        wrong = await client.post("/admin/keys", json={"weight": 0}, headers=ADMIN)
        assert (wrong.status_code, "`weight`" in wrong.text) == (422, True)


async def test_the_first_key_is_not_made_by_whoever_comes(broker: Broker) -> None:
    async with serving(broker.url) as (_, client):
        refused = await client.post("/admin/keys", json={"admin": True})
        assert (refused.status_code, "API_KEY" in refused.text) == (403, True)
        assert (await client.get("/admin/keys")).status_code == 403


SHORT = {"prompt": "a", "max_tokens": 1}
ANSWERS = Answer(ids(" one") * 1000)


def body(max_new_tokens: int = 1) -> dict[str, Any]:
    return {"inputs": "a", "parameters": {"max_new_tokens": max_new_tokens, "ignore_eos": True}}


async def live_of(redis: Redis, key: ApiKey) -> dict[bytes, bytes]:
    used = await redis.hgetall(KEYS.key_use(key.key_id))  # type: ignore[misc]
    return {name: value for name, value in used.items() if name.startswith(b"live:")}


async def test_a_key_has_exactly_its_live_requests_over_all_gateways(broker: Broker, redis: Redis) -> None:
    key, free = await add_key(redis, max_concurrent=3), await add_key(redis)
    async with two_gateways(broker.url, ANSWERS, 0.0) as (worker, _, *clients):
        await worker.pause()
        posts = [
            asyncio.create_task(clients[i % 2].post("/generate", json=body(), headers=bearer(key)))
            for i in range(20)
        ]
        await wait_until(lambda: sum(post.done() for post in posts) == 17)
        assert await live_of(redis, key.record) == {f"live:{KEYS.places}".encode(): b"3"}
        worker.going.set()
        answers = await asyncio.gather(*posts)
        assert Counter(answer.status_code for answer in answers) == {200: 3, 429: 17}
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert refused.json()["error_type"] == "rate_limit" and int(refused.headers["retry-after"]) >= 1
        assert (await clients[0].post("/generate", json=body(), headers=bearer(free))).status_code == 200
        await wait_for(lambda: live_of(redis, key.record), {})


async def test_more_choices_than_a_key_may_have_at_once_are_refused_for_that(
    broker: Broker, redis: Redis
) -> None:
    key = await add_key(redis, max_concurrent=2)
    async with two_gateways(broker.url, ANSWERS, 0.0) as (worker, _, *clients):
        for more in ({"n": 3}, {"prompt": ["a", "b", "c"]}):
            refused = await clients[0].post("/v1/completions", json=SHORT | more, headers=bearer(key))
            assert refused.status_code == 400
            error = refused.json()["error"]
            assert error["param"] == "max_concurrent" and "3 choices" in error["message"]
        assert not worker.seen


async def test_live_requests_are_counted_anew_where_the_sum_is_lost(broker: Broker, redis: Redis) -> None:
    key = await add_key(redis, max_concurrent=2)
    async with two_gateways(broker.url, ANSWERS, 0.0) as (worker, _, *clients):
        await worker.pause()
        post = asyncio.create_task(clients[0].post("/generate", json=body(), headers=bearer(key)))
        await wait_until(lambda: redis.xlen(KEYS.requests))
        await redis.delete(KEYS.places, KEYS.key_use(key.record.key_id))
        second = asyncio.create_task(clients[1].post("/generate", json=body(), headers=bearer(key)))

        await wait_for(lambda: live_of(redis, key.record), {f"live:{KEYS.places}".encode(): b"2"})
        refused = await clients[1].post("/generate", json=body(), headers=bearer(key))
        assert refused.status_code == 429
        worker.going.set()
        assert [(await one).status_code for one in (post, second)] == [200, 200]


async def test_requests_a_minute_are_a_burst_and_then_come_evenly(broker: Broker, redis: Redis) -> None:
    key = await add_key(redis, requests_per_minute=5)
    async with two_gateways(broker.url, ANSWERS, 0.0) as (_, _, *clients):
        began_s = time.time()
        answers = [
            await clients[i % 2].post("/v1/completions", json=SHORT, headers=bearer(key)) for i in range(7)
        ]
        assert time.time() - began_s < 12, "one comes back every 12 s"
        assert [answer.status_code for answer in answers] == [200] * 5 + [429] * 2
        told = [answer.headers["x-ratelimit-remaining-requests"] for answer in answers]
        assert told == ["4", "3", "2", "1", "0", "0", "0"]
        last = answers[-1]
        assert last.headers["x-ratelimit-limit-requests"] == "5"
        assert 40 < int(last.headers["x-ratelimit-reset-requests"].removesuffix("s").replace("1m", "6")) <= 60
        assert 1 <= int(last.headers["retry-after"]) <= 12
        error = last.json()["error"]
        assert (error["code"], error["param"]) == ("rate_limit_exceeded", "requests_per_minute")
        assert key.record.key_id in error["message"] and key.text not in error["message"]
        assert "x-ratelimit-limit-tokens" not in last.headers
        use = KEYS.key_use(key.record.key_id)
        since_ms = int(await redis.hget(use, "at_ms"))  # type: ignore[misc]
        await redis.hset(use, "at_ms", str(since_ms - 13_000))  # type: ignore[misc]
        assert (await clients[0].post("/generate", json=body(), headers=bearer(key))).status_code == 200


async def test_tokens_that_were_not_needed_come_back(broker: Broker, redis: Redis) -> None:
    key = await add_key(redis, tokens_per_minute=300)
    async with two_gateways(broker.url, ANSWERS, 0.0) as (worker, _, *clients):
        answer = await clients[0].post("/generate", json=body(200), headers=bearer(key))
        assert answer.status_code == 200
        num_prompt = worker.seen[-1].num_prompt
        assert answer.headers["x-ratelimit-remaining-tokens"] == str(300 - 200 - num_prompt)
        assert (await clients[1].post("/generate", json=body(200), headers=bearer(key))).status_code == 429
        stopped = {"inputs": "a", "parameters": {"max_new_tokens": 60, "stop": [" one"]}}
        assert (await clients[1].post("/generate", json=stopped, headers=bearer(key))).status_code == 200
        left = float(await redis.hget(KEYS.key_use(key.record.key_id), "tokens"))  # type: ignore[misc]
        assert left >= 300 - 200 - 2 * num_prompt - 1


async def test_a_request_of_more_than_a_minute_takes_all_and_leaves_a_debt(
    broker: Broker, redis: Redis
) -> None:
    key = await add_key(redis, tokens_per_minute=50)
    async with two_gateways(broker.url, ANSWERS, 0.0) as (_, _, *clients):
        answer = await clients[0].post("/generate", json=body(100), headers=bearer(key))
        assert (answer.status_code, answer.headers["x-ratelimit-remaining-tokens"]) == (200, "0")
        left = float(await redis.hget(KEYS.key_use(key.record.key_id), "tokens"))  # type: ignore[misc]
        assert left < -45
        refused = await clients[1].post("/generate", json=body(1), headers=bearer(key))
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) > 50


async def test_choices_are_one_request_and_share_their_prompt(broker: Broker, redis: Redis) -> None:
    key = await add_key(redis, requests_per_minute=10, tokens_per_minute=1000)
    async with two_gateways(broker.url, ANSWERS, 0.0) as (worker, _, *clients):
        asked = {"prompt": ["a", "b"], "n": 2, "max_tokens": 10, "temperature": 1, "stream": True}
        answer = await clients[0].post("/v1/completions", json=asked, headers=bearer(key))
        assert answer.status_code == 200
        assert answer.headers["x-ratelimit-remaining-requests"] == "9"
        num_prompts = worker.seen[0].num_prompt + worker.seen[-1].num_prompt
        # a few tokens come back while the four choices are admitted
        left = int(answer.headers["x-ratelimit-remaining-tokens"])
        assert 1000 - 40 - num_prompts <= left <= 1000 - num_prompts


@pytest.mark.parametrize(
    ("limit", "left", "reset"),
    [
        (60, 59, "1s"),
        (60, 59.9, "100ms"),
        (60, 60, "0ms"),
        (10, -50, "6m0s"),
        (1, -60, "1h1m0s"),
        (60, 29.5, "31s"),
    ],
)
def test_a_reset_is_written_as_by_openai(limit: int, left: float, reset: str) -> None:
    key = ApiKey("k", "", requests_per_minute=limit)
    headers = limit_headers(key, LeftOfRates(left, 0))
    assert headers["x-ratelimit-reset-requests"] == reset


async def test_nothing_is_told_or_stored_without_keys(broker: Broker, redis: Redis) -> None:
    async with two_gateways(broker.url, ANSWERS, 0.0) as (_, _, *clients):
        answer = await clients[0].post("/generate", json=body())
        assert not [name for name in answer.headers if name.startswith("x-ratelimit")]
        assert not await redis.keys("tf:keys*")
        assert client_of(redis).keys.api_keys == "tf:keys"


COUNT = {"inputs": "Count."}
ANSWER = {"generated_text": TEXT}


@pytest.fixture
async def standard_key(redis: Redis) -> IssuedKey:
    return await add_key(redis, tenant="acme", service_class="standard")


@pytest.fixture
async def worker(broker: Broker, standard_key: IssuedKey) -> AsyncIterator[FakeWorker]:
    async with (
        working(broker.url, TOKENIZER, answer) as worker,
        running_gateway(broker.url, api_key="sesame"),
    ):
        yield worker


@pytest.fixture
def service(redis: Redis) -> Service:
    return Service(redis)


async def test_a_job_is_served_for_its_key_alone(
    service: Service, worker: FakeWorker, standard_key: IssuedKey
) -> None:
    await service.submit(standard_key.text, id="a", **COUNT)
    assert await service.result("a") == ANSWER
    request = worker.seen[-1]
    assert (request.key_id, request.tenant, request.class_name) == (
        standard_key.record.key_id,
        "acme",
        "standard",
    )
    await service.submit(None, id="b", **COUNT)
    await service.submit("wrong", id="c", **CHAT)
    await service.submit(standard_key.text, id="d", tenant="other", **COUNT)
    await service.submit("sesame", id="e", tenant="other", priority="interactive", **COUNT)
    assert (await service.result("b"))["error_type"] == "unauthorized"
    assert (await service.result("c"))["error"]["code"] == "invalid_api_key"
    assert "`tenant`" in (await service.result("d"))["error"]
    assert await service.result("e") == ANSWER
    assert (worker.seen[-1].tenant, worker.seen[-1].class_name) == ("other", "interactive")


async def test_nobody_reads_or_cancels_the_job_of_another_tenant(
    service: Service, redis: Redis, worker: FakeWorker, standard_key: IssuedKey
) -> None:
    other = await add_key(redis, tenant="other")
    await worker.pause()
    await service.submit(standard_key.text, id="a", **COUNT)
    await wait_until(lambda: redis.xlen(KEYS.requests))
    stolen = [await service.submit(text, id="a", **COUNT) for text in (None, other.text)]
    assert [(await service.result(entry))["error_type"] for entry in stolen] == ["unauthorized", "conflict"]
    keys: list[dict[Any, Any]] = [{}, {"api_key": other.text}]
    for key in keys:
        await redis.xadd(KEYS.submit, {"cancel": "a"} | key)

    await wait_for(lambda: redis.xlen(KEYS.submit), 1)
    assert not await redis.hexists(KEYS.job("a"), "cancel")  # type: ignore[misc]
    worker.going.set()
    assert await service.result("a") == ANSWER


async def test_the_job_of_a_revoked_key_ends(
    service: Service, redis: Redis, worker: FakeWorker, standard_key: IssuedKey
) -> None:
    await worker.pause()
    await service.submit(standard_key.text, id="a", **COUNT)
    await wait_until(lambda: redis.xlen(KEYS.requests))
    await api_keys.revoke_key(client_of(redis), standard_key.record.key_id)
    failed = await service.result("a")
    assert failed["error_type"] == "unauthorized" and "its API key was revoked" in failed["error"]
    worker.going.set()
    await wait_until(lambda: not worker.live)


async def test_a_job_waits_for_its_key_and_holds_up_no_other(
    service: Service, redis: Redis, worker: FakeWorker, standard_key: IssuedKey
) -> None:
    slow = await add_key(redis, requests_per_minute=1, service_class="standard")
    for job_id in ("a", "b"):
        await service.submit(slow.text, id=job_id, **COUNT)
    await service.submit(standard_key.text, id="c", **COUNT)
    assert await service.result("c") == ANSWER

    async def num_results() -> int:
        return await redis.exists(KEYS.result("a"), KEYS.result("b"))  # type: ignore[no-any-return]

    await wait_until(num_results)
    assert await num_results() == 1
    use = KEYS.key_use(slow.record.key_id)
    await redis.hset(use, "at_ms", str(int(await redis.hget(use, "at_ms")) - 60_000))  # type: ignore[misc]
    assert [await service.result(job_id) for job_id in ("a", "b")] == [ANSWER] * 2


# --- the command --------------------------------------------------------------------------------------------


@pytest.fixture
def broker_url(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", broker.url)


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[str, str]:
    assert admin.main(["keys", *words]) == 0
    captured = capsys.readouterr()
    return captured.out, captured.err


@pytest.mark.usefixtures("broker_url")
def test_the_command_adds_shows_rotates_and_revokes_a_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "list")[0] == "there are no API keys\n"
    words = ("--tenant", "acme", "--name", "reports", "--requests-per-minute", "60", "--expires", "30d")
    text, about = said(capsys, "add", *words, "--models", "a", "b")
    key_id = about.splitlines()[-1].split()[0]
    assert re.fullmatch(r"tf-[\w-]{43}\n", text) and "acme" in about
    table = said(capsys, "list")[0]
    assert all(word in table for word in (key_id, "reports", "acme", "active", "60 requests/min", "a, b"))
    assert text.strip() not in table
    other, _ = said(capsys, "rotate", key_id)
    assert other != text
    assert "is revoked since" in said(capsys, "revoke", key_id)[0]
    assert "revoked" in said(capsys, "list")[0]
    assert admin.main(["keys", "rotate", key_id]) == 1
    assert admin.main(["keys", "revoke", "nobody"]) == 1
    assert "there is no key 'nobody'" in capsys.readouterr().err


@pytest.mark.usefixtures("broker_url")
@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--tenant", "a b"), "--tenant: "),
        (("--class", "urgent"), "--class: "),
        (("--weight", "0"), "--weight: "),
        (("--max-concurrent", "-1"), "--max-concurrent: "),
        (("--expires", "soon"), "--expires: "),
    ],
)
def test_what_is_wrong_in_a_key_is_refused_by_name(words: tuple[str, ...], named: str) -> None:
    with pytest.raises(SettingError) as error:
        admin.main(["keys", "add", *words])
    assert named in str(error.value)
