"""Everything that clients do, at once and at random, some of it cut off half-way: each answer is right, and
afterwards nothing is left.
"""

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import httpx
import psutil
import pytest
from redis.asyncio import Redis

from api.inference.admission import MAX_COMMANDS
from common.broker.client import connect
from common.broker.keys import Keys
from common.messages.codec import decode
from common.messages.events import Events
from common.messages.packing import unpack_floats, unpack_ids
from tests.support.fleet.fleet import Fleet
from tests.support.load import Load
from tests.support.waiting import wait_until

KEYS = Keys("default")
SETTINGS = {
    "num_workers": 2,
    "num_gateways": 2,
    "dtype": "float32",
    "debug_kv": True,
    "kv_cache_bytes": "64MiB",
}
MIB = 2**20
STANDING = {
    "workers",
    "processes",
    "batcher",
    "epoch",
    "control",
    "state",
    "requests",
    "worker",
    "gateway",
    "plans",
    "reports",
    "log",
} | {
    "metrics",
    "timeline",
    "submit",
    "jobworker",
    "arq",
}
"""Keys of a fleet that does nothing: all but those of requests and jobs."""
KEPT = [KEYS.job("job-*"), KEYS.result("job-*"), KEYS.reply("job-*"), KEYS.request("job-*")]
"""Keys of jobs that were answered: for an hour. Requests over HTTP keep none."""

NUM_AT_ONCE = 32
PROMPTS = ["One, two,", "A B C", "The sky is", "Once upon a time", "Hello", "1 + 1 =", "import os", "Q: Why?"]
MOST_TOKENS = 5
MOST_GROWTH = {"tokenfleet engine": 96 * MIB, "tokenfleet": 12 * MIB}
"""Of a process, after its first requests. Tensors of ever new sizes fragment the engine's memory for some
thousand requests.
"""


# --- what clients do ----------------------------------------------------------------------------------------


def greedy(prompt: str, max_new_tokens: int) -> dict[str, Any]:
    return {
        "inputs": prompt,
        "parameters": {"max_new_tokens": max_new_tokens, "ignore_eos": True, "details": True},
    }


class Clients:
    """Clients of one fleet. `heard`: frames of jobs by channel; `jobs`: those that nobody called off."""

    def __init__(self, fleet: Fleet, http: httpx.AsyncClient, redis: Redis, draw: random.Random) -> None:
        self.fleet, self.http, self.redis, self.draw = fleet, http, redis, draw
        self.alone: list[list[int]] = []
        self.heard: dict[str, list[Any]] = {}
        self.num_jobs = 0

    async def learn(self) -> None:
        """What each prompt's answer is when nothing else runs."""
        for prompt in PROMPTS:
            answer = (await self.http.post("/generate", json=greedy(prompt, MOST_TOKENS))).json()
            self.alone.append([token["id"] for token in answer["details"]["tokens"]])

    async def many(self, count: int) -> None:
        turns = asyncio.Semaphore(NUM_AT_ONCE)
        verbs = [
            self.generate,
            self.stream,
            self.chat,
            self.complete,
            self.err,
            self.submit,
            self.look,
            self.leave,
            self.leave_early,
        ]

        async def one(verb: Any) -> None:
            async with turns:
                await verb()

        await asyncio.gather(*(one(self.draw.choice(verbs)) for _ in range(count)))

    def question(self) -> tuple[dict[str, Any], list[int]]:
        """A body and the ids that answer it."""
        place, length = self.draw.randrange(len(PROMPTS)), self.draw.randint(1, MOST_TOKENS)
        return greedy(PROMPTS[place], length), self.alone[place][:length]

    async def generate(self) -> None:
        asked, ids = self.question()
        answer = await self.http.post("/generate", json=asked)
        assert [token["id"] for token in answer.json()["details"]["tokens"]] == ids, answer.text

    async def stream(self) -> None:
        asked, ids = self.question()
        frames = [frame async for frame in self.frames("/generate_stream", asked)]
        assert [frame["token"]["id"] for frame in frames] == ids and frames[-1]["generated_text"] is not None

    async def chat(self) -> None:
        asked: dict[str, Any] = {
            "messages": [{"role": "user", "content": "Hi"}],
            "max_tokens": self.draw.randint(1, MOST_TOKENS),
            "n": self.draw.randint(1, 2),
        }
        if self.draw.random() < 0.5:
            answer = (await self.http.post("/v1/chat/completions", json=asked)).json()
            assert [choice["index"] for choice in answer["choices"]] == list(range(asked["n"])), answer
        else:
            chunks = [chunk async for chunk in self.frames("/v1/chat/completions", asked | {"stream": True})]
            ends = [one["index"] for chunk in chunks for one in chunk["choices"] if one["finish_reason"]]
            assert sorted(ends) == list(range(asked["n"])), chunks[-1]

    async def complete(self) -> None:
        asked: dict[str, Any] = {
            "prompt": PROMPTS[: self.draw.randint(1, 2)],
            "max_tokens": self.draw.randint(1, MOST_TOKENS),
            "seed": 1,
            "n": 2,
        }
        answer = (await self.http.post("/v1/completions", json=asked)).json()
        assert len(answer["choices"]) == 2 * len(asked["prompt"]), answer

    async def err(self) -> None:
        headers = {"content-type": "application/json"}
        path = self.draw.choice(
            ["/generate", "/generate_stream", "/v1/chat/completions", "/v1/completions", "/tokenize"]
        )
        content, status = self.draw.choice(
            [(b"{", 400), (b'{"inputs": 5, "prompt": 5, "messages": 5}', 422), (b" " * 2_000_001, 413)]
        )
        answer = await self.http.post(path, content=content, headers=headers)
        assert answer.status_code == (400 if path.startswith("/v1") and status == 422 else status), (
            answer.text
        )

    async def submit(self) -> None:
        """A job with frames on a channel, in a stream, on both or on neither; one in five is called off."""
        self.num_jobs += 1
        job_id, (asked, ids) = f"job-{self.num_jobs}", self.question()
        address = {"reply_to": f"ext:{job_id}"} if self.draw.random() < 0.5 else {}
        address |= {"reply": "stream"} if self.draw.random() < 0.5 else {}
        await self.redis.xadd(KEYS.submit, {"job": json.dumps({"id": job_id, **asked, **address})})
        called_off = self.draw.random() < 0.2
        if called_off:
            await self.redis.xadd(KEYS.submit, {"cancel": job_id})
        answer = json.loads(await wait_until(lambda: self.redis.get(KEYS.result(job_id))))
        if called_off and "error" in answer:
            return
        assert [token["id"] for token in answer["details"]["tokens"]] == ids, answer
        if "reply_to" in address:
            await wait_until(lambda: len(self.heard.get(job_id, [])) == len(ids))
        if "reply" in address:
            kept = [json.loads(fields[b"frame"]) for _, fields in await self.redis.xrange(KEYS.reply(job_id))]
            assert [frame["token"]["id"] for frame in kept] == ids
            assert self.heard.get(job_id, kept) == kept

    async def look(self) -> None:
        for path in ("/", "/info", "/fleet", "/metrics", "/v1/models"):
            assert (await self.http.get(path)).status_code == 200

    async def leave(self) -> None:
        """Goes after some frames of a long stream."""
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

    async def leave_early(self) -> None:
        """Goes somewhere between the first byte of the request and the first of its answer."""
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

    async def frames(self, path: str, asked: dict[str, Any]) -> AsyncGenerator[Any]:
        async with self.http.stream("POST", path, json=asked) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    yield json.loads(line[6:])

    async def hear(self) -> None:
        """Takes what is said to all jobs, until it is cancelled."""
        async with self.redis.pubsub() as pubsub:
            await pubsub.psubscribe(KEYS.channel("ext:*"))
            async for message in pubsub.listen():
                if message["type"] == "pmessage":
                    self.heard.setdefault(message["channel"].decode().rpartition(":")[2], []).append(
                        json.loads(message["data"])
                    )


@contextlib.asynccontextmanager
async def clients(fleet: Fleet, redis: Redis) -> AsyncIterator[Clients]:
    async with httpx.AsyncClient(
        base_url=fleet.base_url, timeout=120, limits=httpx.Limits(max_connections=None)
    ) as http:
        some = Clients(fleet, http, redis, random.Random(20))
        hearing = asyncio.create_task(some.hear())
        try:
            yield some
        finally:
            hearing.cancel()
            await asyncio.wait([hearing])


# --- what is left -------------------------------------------------------------------------------------------


async def idle(redis: Redis) -> bool:
    """Whether no request, row, block, stream or job is left anywhere, by everybody's own word."""
    state: dict[bytes, bytes] = await redis.hgetall(KEYS.state)  # type: ignore[misc]
    keys = [key async for key in redis.scan_iter(KEYS.gateway("*"))]
    gateways: list[dict[bytes, bytes]] = [await redis.hgetall(key) for key in keys]  # type: ignore[misc]
    kept = {key for pattern in KEPT async for key in redis.scan_iter(pattern)}
    kinds = {key.decode().split(":")[2] async for key in redis.scan_iter(KEYS.key("*")) if key not in kept}
    busy = [int(state.get(name, b"1")) for name in (b"requests", b"rows", b"blocks")]
    return (
        not any(busy)
        and all(gateway[b"streams"] == b"0" for gateway in gateways)
        and kinds <= STANDING
        and not await redis.xlen(KEYS.requests)
        and not await redis.xlen(KEYS.submit)
    )


async def tasks(redis: Redis) -> dict[bytes, int]:
    keys = [key async for key in redis.scan_iter(KEYS.gateway("*"))]
    return {key: int(await redis.hget(key, "tasks") or 0) for key in keys}  # type: ignore[misc]


async def subscriptions(redis: Redis) -> list[Any]:
    channels = await redis.pubsub_channels()
    return [await redis.pubsub_numpat(), sorted(await redis.pubsub_numsub(*channels))]


def processes(fleet: Fleet) -> list[psutil.Process]:
    """All but the broker and the launcher; engines, too."""
    pids = fleet.pids()
    roots = [psutil.Process(pid) for name, pid in pids.items() if name != "broker"]
    return [process for root in roots for process in (root, *root.children(recursive=True))]


def handles(fleet: Fleet) -> dict[int, int]:
    return {process.pid: process.num_fds() for process in processes(fleet)}


def memory(fleet: Fleet) -> dict[str, int]:
    """Bytes by the name of the process."""
    return {process.cmdline()[0]: process.memory_info().rss for process in processes(fleet)}


def grown(fleet: Fleet, before: dict[str, int]) -> dict[str, int]:
    """What has grown too much, by how many bytes."""
    growth = {name: size - before[name] for name, size in memory(fleet).items()}
    return {
        name: more
        for name, more in growth.items()
        if more > next(most for kind, most in MOST_GROWTH.items() if name.startswith(kind))
    }


async def same(now: Any, before: Any) -> bool:
    return bool(await now == before)


def no_more(now: dict[int, int], before: dict[int, int], most: int) -> bool:
    return now.keys() == before.keys() and all(now[pid] <= before[pid] + most for pid in before)


@pytest.mark.parametrize(
    "count", [300, pytest.param(3000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
async def test_nothing_is_left_of_mixed_requests(count: int) -> None:
    with Fleet(**SETTINGS) as fleet:
        async with connect(fleet.redis_url) as redis:
            subscribed = await subscriptions(redis)
            async with clients(fleet, redis) as some:
                await some.learn()
                await some.many(count // 4)
                await wait_until(lambda: idle(redis))
                before = await tasks(redis), handles(fleet), memory(fleet)
                await some.many(count)
                await wait_until(lambda: idle(redis))
                assert not grown(fleet, before[2])
            await wait_until(lambda: same(tasks(redis), before[0]))
            await wait_until(lambda: same(subscriptions(redis), subscribed))
            await wait_until(
                lambda: no_more(handles(fleet), before[1], MAX_COMMANDS)
            )  # connections to the broker are kept
            ttls = [await redis.ttl(key) for pattern in KEPT async for key in redis.scan_iter(pattern)]
            assert ttls and all(ttl != -1 and ttl <= 3600 for ttl in ttls)  # -1: for ever; -2: gone since


# --- lost messages ------------------------------------------------------------------------------------------


async def test_lost_messages_cost_no_frame() -> None:
    """The gateways lose a tenth of all messages; we, who lose none, know what the frames must be."""
    with Fleet(**SETTINGS, tokenfleet_test_lose="0.1:7") as fleet:
        redis = connect(fleet.redis_url)
        async with redis.pubsub() as pubsub:
            await pubsub.psubscribe(KEYS.events("*"))
            load = Load(fleet, 60)
            await load.whole()
            published = await said(pubsub)
        await wait_until(lambda: idle(redis))
        await redis.aclose()
    shown = [[list(frame["token"].values())[:3] for frame in one.frames] for one in load.streams]
    assert sorted(shown) == sorted(published.values())


async def said(pubsub: Any) -> dict[str, list[Any]]:
    """[id, text, log-probability] of every token published, by request."""
    published: dict[str, list[Any]] = {}
    while (message := await pubsub.get_message(timeout=0.2)) is not None:
        for tokens in decode(Events, message["data"]).tokens if message["type"] == "pmessage" else ():
            triples = zip(unpack_ids(tokens.ids), tokens.texts, unpack_floats(tokens.logprobs), strict=True)
            published.setdefault(tokens.request_id, []).extend(map(list, triples))
    return published
