"""Entries and keys that others have written wrongly: they are answered with errors and harm no other job."""

import json
from typing import Any

from deploy.launcher.embedded_broker import Broker
from tests.support.fleet.scripted_worker import FakeWorker
from tests.support.jobs import CHAT, KEYS, TEXT, Service, running_gateway
from tests.support.waiting import wait_until

GARBAGE: list[tuple[str, dict[Any, Any], str]] = [  # name, fields, what the error says
    ("no job", {"jobs": "{}"}, "no field `job`"),
    ("job and cancel", {"job": json.dumps({"inputs": "a"}), "cancel": "x"}, "`job` or `cancel`, not both"),
    ("binary", {b"\xff\xfe": b"\x00\xff"}, "no field `job`"),
    ("not UTF-8", {"job": b"\xff\xfe"}, "not JSON"),
    ("not JSON", {"job": "{"}, "not JSON"),
    ("no object", {"job": "[1]"}, "must be an object"),
    ("no prompt", {"job": "{}"}, "either `inputs` or `messages`"),
    ("two prompts", {"job": json.dumps({"inputs": "a", **CHAT})}, "either `inputs` or `messages`"),
    ("unknown field", {"job": json.dumps({"inputs": "a", "replyto": "ext:x"})}, "replyto"),
    ("wrong type", {"job": json.dumps({"inputs": 5})}, "`inputs`"),
    ("wrong id", {"job": json.dumps({"inputs": "a", "id": "a#0"})}, "`id`"),
    ("long id", {"job": json.dumps({"inputs": "a", "id": "a" * 129})}, "`id`"),
    ("a batch's line", {"job": json.dumps({"inputs": "a", "id": f"batch_{0:032x}/1"})}, "a batch's line"),
    ("wrong parameters", {"job": json.dumps({"inputs": "a", "parameters": [1]})}, "`parameters`"),
    ("not ours", {"job": json.dumps({"inputs": "a", "reply_to": "events:g0"})}, "`reply_to`"),
    ("wrong reply", {"job": json.dumps({"inputs": "a", "reply": "mail"})}, "`reply`"),
    (
        "limit",
        {"job": json.dumps({"inputs": "a", "parameters": {"max_new_tokens": 10**6}})},
        "`max_new_tokens`",
    ),
    ("not served", {"job": json.dumps({"inputs": "a", "parameters": {"adapter_id": "a"}})}, "`adapter_id`"),
    ("another model", {"job": json.dumps({"inputs": "a", "model": "gpt-4"})}, "gpt-4"),
    ("too large", {"job": json.dumps({"inputs": "a" * 3000})}, "larger than 2000 bytes"),
    ("deep", {"job": '{"inputs":' + "[" * 201 + "]" * 201 + "}"}, "more than 201 levels deep"),
    ("too deep", {"job": "[" * 1900}, "not JSON"),
    ("chat of nothing", {"job": json.dumps({"messages": []})}, "`messages`"),
    ("chat with a stream", {"job": json.dumps({**CHAT, "parameters": {"stream": True}})}, "`stream`"),
]


async def test_malformed_entries_are_answered_with_errors(
    service: Service, worker: FakeWorker, broker: Broker
) -> None:
    async with running_gateway(broker.url, payload_limit=2000):
        entries = [
            (name, (await service.redis.xadd(KEYS.submit, fields)).decode(), words)
            for name, fields, words in GARBAGE
        ]
        for name, entry_id, words in entries:
            error = (await service.result(entry_id))["error"]
            assert words in (error if isinstance(error, str) else error["message"]), name
        await service.submit(id="good", inputs="Count.")
        assert await service.result("good") == {"generated_text": TEXT}
        await service.settled()


async def test_overwritten_keys_harm_no_other_job(
    service: Service, worker: FakeWorker, broker: Broker
) -> None:
    await service.redis.set(KEYS.submit, "mine")
    await service.redis.set(KEYS.job("spoiled"), "mine")
    await service.redis.set(KEYS.reply("fine"), "mine")
    await service.redis.rpush(KEYS.result("fine"), "mine")  # type: ignore[misc]
    async with running_gateway(broker.url) as gateway:
        await service.redis.delete(KEYS.submit)
        await service.submit(id="spoiled", inputs="Count.")
        assert "overwritten" in (await service.result("spoiled"))["error"]
        await service.redis.delete(KEYS.submit)
        await wait_until(lambda: service.redis.exists(KEYS.submit))
        await service.redis.delete(KEYS.result("fine"))
        await service.submit(id="fine", inputs="Count.", reply="stream")
        assert await service.result("fine") == {"generated_text": TEXT}
        await service.settled()
        await wait_until(lambda: not gateway.job_consumer.held and not gateway.pool.relay.streams)
