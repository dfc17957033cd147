"""Cases: the requests of chaos, of every kind of stream, and how a client reads the answer to each."""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import msgpack
from arq import create_pool
from arq.connections import ArqRedis, RedisSettings
from arq.jobs import Job, ResultNotFound, SerializationError
from redis.asyncio import Redis

from benchmarks.client import EventReader, HttpStatusError, StreamBroken
from common.broker.client import ERRORS, connect
from common.broker.keys import Keys
from common.messages.request import SERVICE_CLASSES
from tests.support.chaos.answers import Answer, RequestFailed

KEYS = Keys("default")
SEEDED = {"do_sample": True, "temperature": 0.9}
WORDS = "river engine teacher market garden letter bridge storm library soldier orchard machine".split()
NUM_TENANTS = 2
BACK_S = 0.2
AGAIN_S = 5.0
"""A job that is silent for this time is submitted again, which is safe."""


@dataclass(frozen=True, slots=True)
class Case:
    """One request.

    Attributes:
        path: of the route; `submit` and `arq` are jobs.
        priority, tenant: before which others it is served.
        num_choices: of its answer.
    """

    kind: str
    number: int
    path: str
    body: dict[str, Any]
    priority: str
    tenant: str
    num_choices: int = 1

    @property
    def is_whole(self) -> bool:
        """Whether the answer comes in one piece."""
        return self.path in ("/generate", "arq")

    @property
    def headers(self) -> dict[str, str]:
        return {"x-priority": self.priority, "x-tenant": self.tenant}

    def __str__(self) -> str:
        return f"{self.kind} {self.number} ({self.priority})"


def make_cases(seed: int, count: int, num_tokens: int) -> list[Case]:
    """Make `count` requests of each kind."""
    draw = random.Random(seed)
    return [case for number in range(count) for case in make_kinds(draw, number, num_tokens)]


def make_kinds(draw: random.Random, number: int, num_tokens: int) -> list[Case]:
    text = f"Story {number} of the {' and the '.join(draw.sample(WORDS, draw.randint(2, 8)))}:"
    long = {"max_new_tokens": num_tokens, "ignore_eos": True, "details": True}
    greedy, seeded = (
        {"inputs": text, "parameters": long},
        {"inputs": text, "parameters": long | SEEDED | {"seed": number}},
    )
    openai = {"max_tokens": num_tokens, "ignore_eos": True, "seed": number, "stream": True}
    chat = openai | {"messages": [{"role": "user", "content": text}], "temperature": 0.9, "logprobs": True}
    completion = openai | {"prompt": text, "temperature": 0, "logprobs": 0}
    terms = SERVICE_CLASSES[number % len(SERVICE_CLASSES)], f"tenant-{number % NUM_TENANTS}"
    return [
        Case("greedy", number, "/generate_stream", greedy, *terms),
        Case("seeded", number, "/generate_stream", seeded, *terms),
        Case("choices", number, "/v1/chat/completions", chat | {"n": 2}, *terms, num_choices=2),
        Case("completion", number, "/v1/completions", completion, *terms),
        Case("whole", number, "/generate", seeded, *terms),
        Case("job", number, "submit", seeded, *terms),
        Case("arq job", number, "arq", greedy, *terms),
    ]


class Reader:
    """Reads answers over HTTP and Redis."""

    def __init__(self, base_url: str, http: httpx.AsyncClient, redis: Redis, arq: ArqRedis, run: str) -> None:
        self.base_url, self.http, self.redis, self.arq, self.run = base_url, http, redis, arq, run
        self.num_jobs = 0

    async def read(self, case: Case, answer: Answer) -> None:
        """Fill `answer`. Raises RequestFailed, or what `EventReader` raises if a stream cannot go on."""
        match case.path:
            case "submit":
                await self.read_job(case, answer)
            case "arq":
                await self.read_arq(case, answer)
            case "/generate":
                answer.add_whole(await self.post(case))
            case _:
                await self.read_stream(case, answer)

    async def read_stream(self, case: Case, answer: Answer) -> None:
        """Read a stream; if it breaks off after its beginning, go on after the last frame."""
        reader = EventReader(self.base_url)
        frames = reader.post(case.path, case.body, case.headers)
        while True:
            try:
                async for frame in frames:
                    answer.add_frame(frame)
                return
            except (StreamBroken, OSError):
                if not reader.place:
                    raise
                answer.num_cuts += 1
            except HttpStatusError as error:
                if not reader.place:
                    raise
                if error.status != 503:
                    raise RequestFailed(f"to go on: {error}") from error
            await asyncio.sleep(BACK_S)
            frames = reader.go_on()

    async def post(self, case: Case) -> Any:
        response = await self.http.post(self.base_url + case.path, json=case.body, headers=case.headers)
        if response.status_code != 200:
            raise HttpStatusError(response.status_code, response.content)
        return response.json()

    def name_job(self, answer: Answer) -> str:
        self.num_jobs += 1
        answer.job_id = f"job-{self.run}-{self.num_jobs}"
        return answer.job_id

    async def read_job(self, case: Case, answer: Answer) -> None:
        job_id, last, asked_s = self.name_job(answer), "0", 0.0
        terms = {"priority": case.priority, "tenant": case.tenant}
        content = json.dumps({"id": job_id, "reply": "stream", **terms, **case.body})
        redis: Any = self.redis
        while not answer.ended(case.num_choices):
            try:
                if time.monotonic() - asked_s > AGAIN_S:
                    await redis.xadd(KEYS.submit, {"job": content})
                    asked_s = time.monotonic()
                found = await redis.xread({KEYS.reply(job_id): last}, block=500)
            except ERRORS:
                await asyncio.sleep(0.1)
                continue
            for entry_id, fields in found[0][1] if found else []:
                last, asked_s = entry_id, time.monotonic()
                answer.add_frame(json.loads(fields[b"frame"]))

    async def read_arq(self, case: Case, answer: Answer) -> None:
        job_id = self.name_job(answer)
        arguments = case.body["inputs"], case.body["parameters"]
        job = Job(job_id, self.arq, KEYS.arq_queue, msgpack.unpackb)
        while True:
            try:
                await self.arq.enqueue_job(
                    "generate", *arguments, priority=case.priority, tenant=case.tenant, _job_id=job_id
                )
                return answer.add_whole(await job.result(timeout=AGAIN_S, poll_delay=0.25))
            except SerializationError as error:
                raise RequestFailed(str(error)) from error
            except (
                *ERRORS,
                TimeoutError,
                ResultNotFound,
            ):  # the last: the broker has lost that it was queued
                await asyncio.sleep(0.1)


@asynccontextmanager
async def make_reader(base_url: str, redis_url: str, run: str) -> AsyncIterator[Reader]:
    """Make a reader; `run` makes the names of jobs unique."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    arq = await create_pool(
        RedisSettings.from_dsn(redis_url),
        job_serializer=msgpack.packb,
        job_deserializer=msgpack.unpackb,
        default_queue_name=KEYS.arq_queue,
    )
    async with httpx.AsyncClient(timeout=None, limits=limits) as http, connect(redis_url) as redis:
        yield Reader(base_url, http, redis, arq, run)
    await arq.aclose()
