"""Clients of chaos: requests of every kind of stream, a crowd that keeps a constant number of them running,
and how each answer differs from the undisturbed one.
"""

import asyncio
import json
import random
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgpack
from arq.connections import ArqRedis
from arq.jobs import Job, ResultNotFound, SerializationError
from redis.asyncio import Redis

from benchmarks.client import EventReader, HttpStatusError, StreamBroken
from common.broker.client import ERRORS, connect
from common.broker.keys import Keys
from common.messages.request import SERVICE_CLASSES
from tests.support.jobs import arq_client


class RequestFailed(Exception):
    """The answer is an error."""


@dataclass(slots=True)
class Choice:
    """One of the answers to a request.

    Attributes:
        tokens: all that is told of each token but its probability.
        reason: why it ended; empty while it has not.
        whole: the text that the end repeats, where it does.
    """

    tokens: list[Any] = field(default_factory=list)
    text: str = ""
    reason: str = ""
    whole: str = ""

    def add(self, tokens: list[Any], text: str, reason: str | None, whole: str | None = None) -> None:
        self.tokens += tokens
        self.text += text
        self.reason = reason or self.reason
        self.whole = whole or self.whole

    @property
    def content(self) -> tuple[list[Any], str, str, str]:
        return self.tokens, self.text, self.reason, self.whole


@dataclass(slots=True)
class Answer:
    """The choices of one request, by index.

    Attributes:
        job_id: where it is a job.
        num_cuts: how often its stream broke off, and the client came back or tried to.
    """

    job_id: str = ""
    num_cuts: int = 0
    choices: defaultdict[int, Choice] = field(default_factory=lambda: defaultdict(Choice))

    @property
    def num_tokens(self) -> int:
        return sum(len(choice.tokens) for choice in self.choices.values())

    def ended(self, num_choices: int) -> bool:
        return sum(bool(choice.reason) for choice in self.choices.values()) == num_choices

    def add_frame(self, frame: dict[str, Any]) -> None:
        """Add a frame of any route. Raises RequestFailed for an error."""
        if "error" in frame:
            raise RequestFailed(str(frame))
        if "token" in frame:
            self.add_tgi(frame)
        for choice in frame.get("choices", []):
            self.add_openai(choice)

    def add_tgi(self, frame: dict[str, Any]) -> None:
        token, details = frame["token"], frame["details"]
        told = (frame["index"], token["id"], token["text"])
        reason = details and details["finish_reason"]
        self.choices[0].add([told], token["text"], reason, frame["generated_text"])

    def add_openai(self, choice: dict[str, Any]) -> None:
        text = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
        logprobs = choice.get("logprobs") or {}
        tokens = logprobs.get("tokens") or [token["bytes"] for token in logprobs.get("content") or []]
        self.choices[choice["index"]].add(tokens, text, choice["finish_reason"])

    def add_whole(self, answer: dict[str, Any]) -> None:
        """Add an answer that is not streamed. Raises RequestFailed for an error."""
        if "error" in answer:
            raise RequestFailed(str(answer))
        told = [(i, token["id"], token["text"]) for i, token in enumerate(answer["details"]["tokens"], 1)]
        text = answer["generated_text"]
        self.choices[0].add(told, text, answer["details"]["finish_reason"], text)


def compare(answer: Answer, expected: Answer, is_cut: bool) -> str:
    """Return how the first choice that is wrong differs; empty if none is. A choice of a cut answer must be
    the beginning of the expected one.
    """
    for index, right in expected.choices.items():
        found, count = answer.choices[index], len(answer.choices[index].tokens)
        if is_cut and not found.reason:
            same = found.tokens == right.tokens[:count] and right.text.startswith(found.text)
        else:
            same = found.content == right.content
        if not same:
            equal = [one == other for one, other in zip(found.tokens, right.tokens, strict=False)]
            first = equal.index(False) if False in equal else len(equal)
            reason = found.reason or "not ended"
            return f"choice {index} has {count} tokens ({reason}), and not its own from token {first} on"
    return ""


KEYS = Keys("default")
SEEDED = {"do_sample": True, "temperature": 0.9}
WORDS = "river engine teacher market garden letter bridge storm library soldier orchard machine".split()
NUM_TENANTS = 2
BACK_S = 0.2
SUBMIT_AGAIN_S = 5.0
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
    greedy = {"inputs": text, "parameters": long}
    seeded = {"inputs": text, "parameters": long | SEEDED | {"seed": number}}
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
                if time.monotonic() - asked_s > SUBMIT_AGAIN_S:
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
                return answer.add_whole(await job.result(timeout=SUBMIT_AGAIN_S, poll_delay=0.25))
            except SerializationError as error:
                raise RequestFailed(str(error)) from error
            except (*ERRORS, TimeoutError, ResultNotFound):  # ResultNotFound: the broker has lost it
                await asyncio.sleep(0.1)


@asynccontextmanager
async def make_reader(base_url: str, redis_url: str, run: str) -> AsyncIterator[Reader]:
    """Make a reader; `run` makes the names of jobs unique."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with (
        arq_client(redis_url) as arq,
        httpx.AsyncClient(timeout=None, limits=limits) as http,
        connect(redis_url) as redis,
    ):
        yield Reader(base_url, http, redis, arq, run)


ASK_AGAIN_S = 0.2
HUNG_S, WHOLE_HUNG_S = 90.0, 300.0
"""A request without a token for this time hangs. An answer in one piece has no token before its end, and may
first wait for a place.
"""
BROKEN = (StreamBroken, httpx.TransportError, OSError)


@dataclass
class Tally:
    """What clients saw.

    Attributes:
        whole: answers checked to their end, by kind.
        resumed: answers whose streams broke off and went on, by kind.
        cut: requests that a gateway's death ended; what they had was the beginning of the right answer.
        refused: requests that were refused or not connected, and asked again, by cause.
        wrong: what must not be, in words.
    """

    whole: Counter[str] = field(default_factory=Counter)
    resumed: Counter[str] = field(default_factory=Counter)
    cut: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    num_tokens: int = 0


class Crowd:
    """Clients of one fleet.

    Attributes:
        expected: the first answer to each case, by its name; it is undisturbed.
        gateway_hit_s: when a gateway was killed last, or had been stopped for as long as it was to be.
    """

    def __init__(self, reader: Reader, cases: list[Case], seed: int, tally: Tally) -> None:
        self.reader, self.cases, self.draw = reader, cases, random.Random(seed)
        self.expected: dict[str, Answer] = {}
        self.tally = tally
        self.live: dict[int, tuple[Case, Answer]] = {}
        self.gateway_hit_s = -1.0
        self.stopping = asyncio.Event()

    async def learn(self, num_streams: int) -> None:
        """Ask for the answer to each case while nothing is disturbed."""
        waiting = list(self.cases)

        async def ask(number: int) -> None:
            while waiting:
                await self.insist(number, waiting.pop())

        await asyncio.gather(*(ask(number) for number in range(num_streams)))

    async def run(self, num_streams: int) -> None:
        """Keep `streams` streams running until `stopping` is set, then end those that run."""
        await asyncio.gather(*(self.run_client(number) for number in range(num_streams)))

    async def run_client(self, number: int) -> None:
        while not self.stopping.is_set():
            await self.insist(number, self.draw.choice(self.cases))

    async def insist(self, number: int, case: Case) -> None:
        """Ask until the case is done, or all is to end."""
        while not await self.ask(number, case):
            if self.stopping.is_set():
                return
            await asyncio.sleep(ASK_AGAIN_S)

    async def ask(self, number: int, case: Case) -> bool:
        """Ask once. Returns whether the case is done: answered, or failed."""
        answer, asked_s = Answer(), time.monotonic()
        self.live[number] = case, answer
        is_cut = False
        try:
            await self.read(case, answer)
        except HttpStatusError as error:
            self.tally.refused[f"{error.status} {error.body[:80].decode(errors='replace')}"] += 1
            return False
        except (RequestFailed, TimeoutError) as error:
            self.complain(case, f"{answer.job_id} failed after {answer.num_tokens} tokens: {error}")
            return True
        except BROKEN as error:
            if not answer.num_tokens and (case.path != "/generate" or isinstance(error, httpx.ConnectError)):
                self.tally.refused[type(error).__name__] += 1
                return False
            answer.num_cuts += 1
            is_cut = True
        except Exception as error:  # the run goes on, and tells of it
            self.complain(case, f"{answer.job_id} {type(error).__name__}: {error}")
            return True
        finally:
            del self.live[number]
        if answer.num_cuts and self.gateway_hit_s < asked_s:
            self.complain(case, "broke off, and no gateway was killed")
        self.check(case, answer, is_cut)
        return not is_cut

    async def read(self, case: Case, answer: Answer) -> None:
        """Read the answer. Raises TimeoutError when it hangs."""
        reading = asyncio.create_task(self.reader.read(case, answer))
        count, seen_s, hung_s = -1, 0.0, WHOLE_HUNG_S if case.is_whole else HUNG_S
        try:
            while not reading.done():
                if answer.num_tokens != count:
                    count, seen_s = answer.num_tokens, time.monotonic()
                if time.monotonic() - seen_s > hung_s:
                    raise TimeoutError(f"no token for {hung_s:.0f} s")
                await asyncio.wait([reading], timeout=1.0)
            reading.result()
        finally:
            reading.cancel()

    def check(self, case: Case, answer: Answer, is_cut: bool) -> None:
        (self.tally.cut if is_cut else self.tally.whole)[case.kind] += 1
        self.tally.resumed[case.kind] += answer.num_cuts > 0 and not is_cut
        self.tally.num_tokens += answer.num_tokens
        expected = self.expected.setdefault(str(case), answer)
        if difference := compare(answer, expected, is_cut):
            self.complain(case, difference)

    def complain(self, case: Case, text: str) -> None:
        self.tally.wrong.append(f"{case}: {text}")
        print(f"WRONG {time.strftime('%X')} {case}: {text}", flush=True)
