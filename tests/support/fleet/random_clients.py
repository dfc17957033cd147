"""Clients that send all kinds of requests at once, in random order; some disconnect half-way."""

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any
from uuid import uuid4

import httpx
from redis.asyncio import Redis

from common.broker.keys import Keys
from tests.support.fleet.fleet import Fleet
from tests.support.waiting import wait_until

KEYS = Keys("default")
NUM_AT_ONCE = 32
PROMPTS = ["One, two,", "A B C", "The sky is", "Once upon a time", "Hello", "1 + 1 =", "import os", "Q: Why?"]
MOST_TOKENS = 5


def greedy(prompt: str, max_new_tokens: int) -> dict[str, Any]:
    return {
        "inputs": prompt,
        "parameters": {"max_new_tokens": max_new_tokens, "ignore_eos": True, "details": True},
    }


class Clients:
    """Clients of one fleet. `alone`: the ids that answer each prompt when nothing else runs;
    `published`: frames of jobs by channel.
    """

    def __init__(self, fleet: Fleet, http: httpx.AsyncClient, redis: Redis, draw: random.Random) -> None:
        self.fleet, self.http, self.redis, self.draw = fleet, http, redis, draw
        self.alone: list[list[int]] = []
        self.published: dict[str, list[Any]] = {}
        self.num_jobs = 0
        self.name = uuid4().hex  # results of jobs stay in the broker of a fleet that others used

    async def learn_answers(self) -> None:
        """Fill `alone`."""
        for prompt in PROMPTS:
            answer = (await self.http.post("/generate", json=greedy(prompt, MOST_TOKENS))).json()
            self.alone.append([token["id"] for token in answer["details"]["tokens"]])

    async def send(self, count: int) -> None:
        slots = asyncio.Semaphore(NUM_AT_ONCE)
        actions = [
            self.generate,
            self.stream,
            self.chat,
            self.complete,
            self.send_malformed,
            self.submit,
            self.get_pages,
            self.disconnect,
            self.disconnect_early,
        ]

        async def one(action: Any) -> None:
            async with slots:
                await action()

        await asyncio.gather(*(one(self.draw.choice(actions)) for _ in range(count)))

    def random_request(self) -> tuple[dict[str, Any], list[int]]:
        """Return a body, and the ids that answer it."""
        place, length = self.draw.randrange(len(PROMPTS)), self.draw.randint(1, MOST_TOKENS)
        return greedy(PROMPTS[place], length), self.alone[place][:length]

    async def generate(self) -> None:
        body, ids = self.random_request()
        answer = await self.http.post("/generate", json=body)
        assert [token["id"] for token in answer.json()["details"]["tokens"]] == ids, answer.text

    async def stream(self) -> None:
        body, ids = self.random_request()
        frames = [frame async for frame in self.frames("/generate_stream", body)]
        assert [frame["token"]["id"] for frame in frames] == ids and frames[-1]["generated_text"] is not None

    async def chat(self) -> None:
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": "Hi"}],
            "max_tokens": self.draw.randint(1, MOST_TOKENS),
            "n": self.draw.randint(1, 2),
        }
        if self.draw.random() < 0.5:
            answer = (await self.http.post("/v1/chat/completions", json=body)).json()
            assert [choice["index"] for choice in answer["choices"]] == list(range(body["n"])), answer
        else:
            chunks = [chunk async for chunk in self.frames("/v1/chat/completions", body | {"stream": True})]
            ends = [one["index"] for chunk in chunks for one in chunk["choices"] if one["finish_reason"]]
            assert sorted(ends) == list(range(body["n"])), chunks[-1]

    async def complete(self) -> None:
        body: dict[str, Any] = {
            "prompt": PROMPTS[: self.draw.randint(1, 2)],
            "max_tokens": self.draw.randint(1, MOST_TOKENS),
            "seed": 1,
            "n": 2,
        }
        answer = (await self.http.post("/v1/completions", json=body)).json()
        assert len(answer["choices"]) == 2 * len(body["prompt"]), answer

    async def send_malformed(self) -> None:
        headers = {"content-type": "application/json"}
        path = self.draw.choice(
            ["/generate", "/generate_stream", "/v1/chat/completions", "/v1/completions", "/tokenize"]
        )
        content, status = self.draw.choice(
            [(b"{", 400), (b'{"inputs": 5, "prompt": 5, "messages": 5}', 422), (b" " * 2_000_001, 413)]
        )
        try:
            answer = await self.http.post(path, content=content, headers=headers)
        except (httpx.ReadError, httpx.WriteError):
            # the answer to a body that is still being sent may be lost (RFC 9112, section 9.6)
            assert status == 413
            return
        assert answer.status_code == (400 if path.startswith("/v1") and status == 422 else status), (
            answer.text
        )

    async def submit(self) -> None:
        """Submit a job with frames on a channel, in a stream, on both or on neither; cancel one in five."""
        self.num_jobs += 1
        job_id, (body, ids) = f"job-{self.num_jobs}-{self.name}", self.random_request()
        address = {"reply_to": f"ext:{job_id}"} if self.draw.random() < 0.5 else {}
        address |= {"reply": "stream"} if self.draw.random() < 0.5 else {}
        await self.redis.xadd(KEYS.submit, {"job": json.dumps({"id": job_id, **body, **address})})
        is_cancelled = self.draw.random() < 0.2
        if is_cancelled:
            await self.redis.xadd(KEYS.submit, {"cancel": job_id})
        answer = json.loads(await wait_until(lambda: self.redis.get(KEYS.result(job_id))))
        if is_cancelled and "error" in answer:
            return
        assert [token["id"] for token in answer["details"]["tokens"]] == ids, (answer, ids)
        if "reply_to" in address:
            await wait_until(lambda: len(self.published.get(job_id, [])) == len(ids))
        if "reply" in address:
            kept = [json.loads(fields[b"frame"]) for _, fields in await self.redis.xrange(KEYS.reply(job_id))]
            assert [frame["token"]["id"] for frame in kept] == ids
            assert self.published.get(job_id, kept) == kept

    async def get_pages(self) -> None:
        for path in ("/", "/info", "/fleet", "/metrics", "/v1/models"):
            assert (await self.http.get(path)).status_code == 200

    async def disconnect(self) -> None:
        """Disconnect after some frames of a long stream."""
        tgi: dict[str, Any] = {
            "inputs": "Hi",
            "stream": True,
            "parameters": {"ignore_eos": True, "max_new_tokens": 500},
        }
        openai: dict[str, Any] = {
            "stream": True,
            "ignore_eos": True,
            "max_tokens": 500,
            "n": self.draw.randint(1, 2),
        }
        chat = openai | {"messages": [{"role": "user", "content": "Hi"}]}
        bodies: dict[str, Any] = {
            "/": tgi,
            "/generate_stream": tgi,
            "/v1/chat/completions": chat,
            "/v1/completions": openai | {"prompt": "Hi"},
        }
        path, num_frames = self.draw.choice(sorted(bodies)), self.draw.randint(1, 4)
        async with contextlib.aclosing(self.frames(path, bodies[path])) as frames:
            async for _ in frames:
                num_frames -= 1
                if not num_frames:
                    return

    async def disconnect_early(self) -> None:
        """Disconnect between the first byte of the request and the first byte of its answer."""
        host, port = self.fleet.base_url.removeprefix("http://").split(":")
        content = json.dumps(greedy("Hi", 500)).encode()
        headers = ("Host: x", "Content-Type: application/json", f"Content-Length: {len(content)}", "", "")
        head = "\r\n".join(("POST /generate HTTP/1.1", *headers)).encode()
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write((head + content)[: self.draw.choice([10, len(head), len(head) + 10, None, None])])
        await writer.drain()
        if self.draw.random() < 0.5:
            writer.transport.abort()
        writer.close()

    async def frames(self, path: str, body: dict[str, Any]) -> AsyncGenerator[Any]:
        async with self.http.stream("POST", path, json=body) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    yield json.loads(line[6:])

    async def collect_frames(self) -> None:
        """Collect the frames of all jobs until cancelled."""
        async with self.redis.pubsub() as pubsub:
            await pubsub.psubscribe(KEYS.channel("ext:*"))
            async for message in pubsub.listen():
                if message["type"] == "pmessage":
                    self.published.setdefault(message["channel"].decode().rpartition(":")[2], []).append(
                        json.loads(message["data"])
                    )


@contextlib.asynccontextmanager
async def random_clients(fleet: Fleet, redis: Redis) -> AsyncIterator[Clients]:
    async with httpx.AsyncClient(
        base_url=fleet.base_url, timeout=120, limits=httpx.Limits(max_connections=None)
    ) as http:
        some = Clients(fleet, http, redis, random.Random(20))
        collecting = asyncio.create_task(some.collect_frames())
        try:
            yield some
        finally:
            collecting.cancel()
            await asyncio.wait([collecting])
