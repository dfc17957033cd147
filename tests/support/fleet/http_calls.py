"""Requests over HTTP to a fleet, and their answers."""

import json
from typing import Any

import httpx
from redis.asyncio import Redis

from common.broker.keys import Keys
from tests.support.waiting import wait_until

KEYS = Keys("default")

PROMPT = "Once upon a time there was"


async def post(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
    answer = await http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def generate(http: httpx.AsyncClient, inputs: str = PROMPT, **parameters: Any) -> Any:
    """Return the answer, with `ids` and `reason` beside it."""
    body = {"inputs": inputs, "parameters": {"max_new_tokens": 12, "details": True, **parameters}}
    answer = await post(http, "/generate", body)
    details = answer["details"]
    return answer | {"ids": [token["id"] for token in details["tokens"]], "reason": details["finish_reason"]}


async def timeline(http: httpx.AsyncClient, request: str) -> list[str]:
    """Return what has happened to the request of a key, and to its choices. The batcher writes it a moment
    later.
    """
    answer = (await http.get(f"/fleet/requests/{request.rpartition(':')[2]}")).json()
    return [one["what"] for events in answer.get("timelines", {}).values() for one in events]


async def complete(http: httpx.AsyncClient, **fields: Any) -> list[str]:
    """Return the texts of the choices of a completion."""
    answer = await post(http, "/v1/completions", {"prompt": PROMPT, "max_tokens": 12, **fields})
    return [choice["text"] for choice in answer["choices"]]


async def done_job(redis: Redis, **job: Any) -> Any:
    """Submit a job → its result."""
    entry = await redis.xadd(KEYS.submit, {"job": json.dumps(job)})
    return json.loads(await wait_until(lambda: redis.get(KEYS.result(entry.decode()))))
