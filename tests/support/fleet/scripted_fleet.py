"""Many scripted workers that share the requests of one pool."""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator

from benchmarks.client import HttpStatusError, Stream, stream
from common.broker.client import ERRORS
from common.messages.codec import decode
from common.messages.events import REPEAT_S
from common.messages.records import unpack_ids
from common.messages.request import Generate
from tests.support.fleet.scripted_worker import Answer, FakeWorker, Live
from tests.support.tokenizer import TOKENIZER
from tests.support.waiting import wait_until

WORDS: list[int] = TOKENIZER.encode(
    " zero one two three four five six seven eight nine ten eleven twelve"
).ids
NUM_REQUESTS = 200
"""Requests that are taken at once."""
NUM_ARRIVING = 40


def answer_ids(number: int, num_tokens: int) -> list[int]:
    """Return the answer to the prompt with this number."""
    return [WORDS[(number + i) % len(WORDS)] for i in range(num_tokens)]


def answer(request: Generate) -> Answer:
    number = int(TOKENIZER.decode(unpack_ids(request.prompt_ids)).split()[-1])
    return Answer(answer_ids(number, request.stopping.max_new_tokens))


def body(number: int, num_tokens: int) -> dict[str, object]:
    parameters = {"max_new_tokens": num_tokens, "ignore_eos": True}
    return {"inputs": f"number {number}", "parameters": parameters}


class Member(FakeWorker):
    """One of the workers: it gets its requests from the fleet, and trims its log as seldom as a real one."""

    spill_steps = 64
    repeated_s = 0.0

    async def take(self) -> None:
        pass

    async def repeat(self) -> None:
        if time.monotonic() - self.repeated_s > REPEAT_S:
            self.repeated_s = time.monotonic()
            await super().repeat()


class ScriptedFleet:
    """Scripted workers, and the batcher that gives each request to the next of them."""

    def __init__(self, url: str, num_workers: int, step_s: float, pool: str) -> None:
        self.members = [Member(url, TOKENIZER, answer, step_s, pool) for _ in range(num_workers)]
        self.batcher = self.members[0]
        self.last_entry = b"0"
        self.num_taken = 0

    async def run(self) -> None:
        for member in self.members:
            await member.open()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.take_requests())
            for member in self.members:
                tasks.create_task(self.begin(member))

    async def begin(self, member: Member) -> None:
        """Workers do not step at the same moment."""
        await asyncio.sleep(random.uniform(0, member.step_s))
        await member.run()

    async def take_requests(self) -> None:
        while True:
            with contextlib.suppress(*ERRORS):
                await self.take_new()
            await asyncio.sleep(0.01)

    async def take_new(self) -> None:
        redis, keys = self.batcher.redis, self.batcher.keys
        entries = await redis.xrange(keys.requests, b"(" + self.last_entry, count=NUM_REQUESTS)
        for entry_id, fields in entries:
            request = decode(Generate, fields[b"generate"])
            member = self.members[self.num_taken % len(self.members)]
            placed = {"worker": member.incarnation, "attempt": 1, "base": 0}
            await redis.hset(keys.request(request.request_id), mapping=placed)  # type: ignore[misc]
            self.last_entry = entry_id
            self.num_taken += 1
            member.live[request.request_id] = Live(entry_id, request, answer(request), TOKENIZER)


@contextlib.asynccontextmanager
async def scripted_fleet(
    url: str, num_workers: int, step_s: float, pool: str = "default"
) -> AsyncIterator[ScriptedFleet]:
    """Workers that are ready and work while the context is open."""
    fleet = ScriptedFleet(url, num_workers, step_s, pool)
    task = asyncio.create_task(fleet.run())
    try:
        yield fleet
    finally:
        task.cancel()
        await asyncio.wait([task])
        for member in fleet.members:
            await member.redis.aclose()


async def begin(url: str, content: dict[str, object], answer: Stream) -> asyncio.Task[Stream]:
    """Read a stream in a task; returns when it has begun. A request that is refused is sent again: a broker
    on a busy machine may not answer the gateway in time.
    """
    task = asyncio.create_task(stream(url, content, answer))
    await wait_until(lambda: answer.frames or task.done())
    error = None if answer.frames else task.exception()
    refused = isinstance(error, HttpStatusError) and error.status == 503
    return await begin(url, content, answer) if refused else task


async def count_wrong(url: str, num_streams: int, num_tokens: int) -> int:
    """Read `num_streams` streams; NUM_ARRIVING of them wait for their first token at once, the others go on
    together. Return how many are not exactly their answers.
    """
    arriving = asyncio.Semaphore(NUM_ARRIVING)

    async def is_wrong(number: int) -> bool:
        answer = Stream()
        async with arriving:
            task = await begin(f"{url}/generate_stream", body(number, num_tokens), answer)
        await task
        ids = answer_ids(number, num_tokens)
        texts = [TOKENIZER.decode([token_id]) for token_id in ids]
        got = [(frame["index"], frame["token"]["id"], frame["token"]["text"]) for frame in answer.frames]
        return got != list(zip(range(1, num_tokens + 1), ids, texts, strict=True))

    return sum(await asyncio.gather(*(is_wrong(number) for number in range(num_streams))))
