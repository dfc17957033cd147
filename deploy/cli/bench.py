"""`tokenfleet bench`: measures this fleet, alone or beside another server with OpenAI's `/v1/completions`.

A number of users send requests, each the next one when the last is answered. Answers are streamed and greedy,
and go on after the end of a sequence where a server can do so (`ignore_eos`). Prompts differ from their first
words on, so that no server's prefix cache helps. Requests that run when the time of a load is over are
answered, too, so every wait is known.
"""

import argparse
import asyncio
import contextlib
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import itemgetter
from typing import Any, NamedTuple

import httpx
import orjson

from common.process.logs import plural
from common.settings.settings import SettingError
from deploy.cli.client import (
    ServerError,
    SseDecoder,
    answer_errors,
    check_status,
    model_name,
    new_client,
    print_lines,
    table_of,
)

READ_TIMEOUT_S = 60.0
RETRY_S = 0.2
MAX_USERS = 1024
WORDS_PER_TOKEN = 0.8
"""Of these prompts, with usual tokenizers. The first answer says how many tokens they really have."""
WORDS = (
    "the quiet river engine measured a broken garden while storm letters described practical teachers "
    "painted bridges followed golden machines and curious captains remembered every distant harbour"
).split()
BUSY_CORES = 0.7
"""Processor time of this client by time, from which on it may be what limits the figures."""


@dataclass(slots=True)
class TimedAnswer:
    """An answer, filled in while it is streamed.

    Attributes:
        sent_s, times_s: monotonic times of the request, and of each frame with tokens.
        num_tokens, prompt_tokens: as the server counts them; without its count, the frames, and 0.
        error: why it failed; empty if it did not.
    """

    sent_s: float = field(default_factory=time.monotonic)
    times_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    prompt_tokens: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server, and the name of its model."""

    client: httpx.AsyncClient
    model: str

    @property
    def url(self) -> str:
        return str(self.client.base_url).rstrip("/")

    async def ask(self, prompt: str, max_tokens: int, answer: TimedAnswer) -> None:
        """Send a request, and fill in the answer until it ends. Raises ServerError."""
        asked = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        asked |= {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
        frames = SseDecoder()
        with answer_errors(self.url):
            async with self.client.stream("POST", "/v1/completions", json=asked) as response:
                if response.status_code != httpx.codes.OK:
                    check_status(response.status_code, await response.aread())
                async for chunk in response.aiter_raw():
                    now_s = time.monotonic()
                    for frame in frames.feed(chunk):
                        read_frame(answer, frame, now_s)
        answer.num_tokens = answer.num_tokens or len(answer.times_s)
        if not answer.num_tokens:
            raise ServerError("the server's answer has no token")


def read_frame(answer: TimedAnswer, frame: dict[str, Any], now_s: float) -> None:
    """Add one frame to an answer. A token may have no text (half a character); a last frame with only a
    finish reason has no token. Raises ServerError.
    """
    for choice in frame.get("choices") or ():
        if choice.get("text") or not choice.get("finish_reason"):
            answer.times_s.append(now_s)
    usage = frame.get("usage") or {}
    answer.num_tokens = usage.get("completion_tokens") or answer.num_tokens
    answer.prompt_tokens = usage.get("prompt_tokens") or answer.prompt_tokens


class Figures(NamedTuple):
    """What one server did under one load. Times are None where no answer came.

    Attributes:
        first_p50_s, first_p99_s: from the request to the first frame with tokens.
        next_p50_s, next_p99_s: between two frames of one answer.
        answer_tokens: mean of an answer, by the server's count.
    """

    users: int
    url: str
    tokens_per_s: float
    first_p50_s: float | None
    first_p99_s: float | None
    next_p50_s: float | None
    next_p99_s: float | None
    prompt_tokens: int
    answer_tokens: float
    num_answers: int
    num_errors: int
    error: str


def figures_of(
    users: int, url: str, answers: Sequence[TimedAnswer], begun_s: float, seconds: float
) -> Figures:
    """The figures of a load. Tokens that come after `seconds` do not count as speed."""
    whole = [one for one in answers if not one.error]
    num_tokens = sum(one.num_tokens for one in whole)
    num_frames = sum(len(one.times_s) for one in whole)
    in_time = sum(at_s <= begun_s + seconds for one in whole for at_s in one.times_s)
    firsts = [one.times_s[0] - one.sent_s for one in whole if one.times_s]
    gaps = [later - sooner for one in whole for sooner, later in pairwise(one.times_s)]
    errors = [one.error for one in answers if one.error]
    return Figures(
        users,
        url,
        in_time / seconds * (num_tokens / num_frames if num_frames else 0),
        percentile(firsts, 50),
        percentile(firsts, 99),
        percentile(gaps, 50),
        percentile(gaps, 99),
        max((one.prompt_tokens for one in whole), default=0),
        num_tokens / len(whole) if whole else 0.0,
        len(whole),
        len(errors),
        next(iter(errors), ""),
    )


def percentile(waits: Sequence[float], part: int) -> float | None:
    """The nearest rank."""
    return sorted(waits)[-(-part * len(waits) // 100) - 1] if waits else None


async def measure(urls: Sequence[str], plan: argparse.Namespace) -> tuple[list[Figures], float]:
    """Measure the servers, ours first, in turns under the loads of a plan (the flags of the command). Returns
    the figures, and the processor time of this client by time. Raises ServerError if a server does not answer
    its first requests.
    """
    async with contextlib.AsyncExitStack() as stack:
        servers = []
        for url, key in zip(urls, map(os.environ.get, ("API_KEY", "AGAINST_API_KEY")), strict=False):
            client = await stack.enter_async_context(new_client(httpx.AsyncClient, url, READ_TIMEOUT_S, key))
            with answer_errors(url):
                servers.append(Endpoint(client, model_name(await client.get("/v1/models"))))
        begun_s, begun_cpu_s = time.monotonic(), time.process_time()
        texts = prompts(await warm_up(servers, plan))
        seconds = plan.duration / len(servers) / len(plan.concurrency)
        found = [
            await run_load(server, users, texts, plan.max_tokens, seconds)
            for turn, users in enumerate(plan.concurrency)
            for server in servers[:: -1 if turn % 2 else 1]
        ]
        cores = (time.process_time() - begun_cpu_s) / (time.monotonic() - begun_s)
    return sorted(found, key=lambda one: (one.users, urls.index(one.url))), cores


async def warm_up(servers: Sequence[Endpoint], plan: argparse.Namespace) -> int:
    """Have each server answer as many requests at once as it will get. Returns the number of words of a
    prompt with the wanted number of tokens, as the first server counts them. Raises ServerError.
    """
    wanted: int = plan.prompt_tokens
    num_words = round(wanted * WORDS_PER_TOKEN)
    texts, first = prompts(num_words), TimedAnswer()
    for server in servers:
        print(f"{server.url}: warming up", file=sys.stderr)
        try:
            await server.ask(next(texts), 1, first)
            others = [TimedAnswer() for _ in range(max(plan.concurrency))]
            await asyncio.gather(*(server.ask(next(texts), plan.max_tokens, one) for one in others))
        except ServerError as error:
            raise ServerError(f"{server.url} answers no request: {error}") from error
    return max(1, round(num_words * wanted / (first.prompt_tokens or wanted)))


def prompts(num_words: int) -> Iterator[str]:
    """Yield prompts without end."""
    while True:
        yield " ".join([f"Story {random.randrange(10**9)}:", *random.choices(WORDS, k=max(0, num_words - 2))])


async def run_load(
    server: Endpoint, users: int, texts: Iterator[str], max_tokens: int, seconds: float
) -> Figures:
    """Have users send requests for some seconds, and wait for the last answers."""
    print(f"{server.url}: {plural(users, 'user')} for {seconds:.0f} s", file=sys.stderr)
    answers: list[TimedAnswer] = []
    begun_s = time.monotonic()

    async def user() -> None:
        while time.monotonic() < begun_s + seconds:
            answers.append(answer := TimedAnswer())
            try:
                await server.ask(next(texts), max_tokens, answer)
            except ServerError as error:
                answer.error = str(error)
                await asyncio.sleep(RETRY_S)

    await asyncio.gather(*(user() for _ in range(users)))
    return figures_of(users, server.url, answers, begun_s, seconds)


COLUMNS = {
    "tokens/s": ("tokens_per_s", 1),
    "first token ms": ("first_p50_s", 1000),
    "first p99": ("first_p99_s", 1000),
    "next token ms": ("next_p50_s", 1000),
    "next p99": ("next_p99_s", 1000),
}
"""Title → the figure, and what it is multiplied with to be shown."""


def show(found: Sequence[Figures], plan: argparse.Namespace, cores: float) -> None:
    """Print a line for each load and server, with ours divided by theirs, and what a reader must know to
    judge the figures.
    """
    rows: list[dict[str, str]] = []
    for one in found:
        values = {title: getattr(one, name) for title, (name, _) in COLUMNS.items()}
        shown = {title: number(values[title], factor) for title, (_, factor) in COLUMNS.items()}
        rows.append({"users": str(one.users), "server": one.url, **shown, "errors": str(one.num_errors)})
        if one.url == found[0].url:
            own = values
        else:
            pairs = {title: (own[title], theirs) for title, theirs in values.items()}
            ratios = {title: f"{a / b:.2f}×" if a and b else "–" for title, (a, b) in pairs.items()}
            rows.append({"users": "", "server": "ours / theirs", **ratios, "errors": ""})
    table = table_of(rows, {title: itemgetter(title) for title in rows[0]})
    print_lines(table, *dict.fromkeys(notes(found, plan, cores)))


def number(value: float | None, factor: int) -> str:
    """A value with three digits."""
    if value is None:
        return "–"
    value *= factor
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def notes(found: Sequence[Figures], plan: argparse.Namespace, cores: float) -> Iterator[str]:
    for one in found:
        yield f"{one.url}: prompts of {one.prompt_tokens or 'unknown'} tokens, {plan.max_tokens} new ones"
        if one.error:
            yield f"{one.url}: {plural(one.num_errors, 'request')} failed; the first: {one.error}"
        if one.num_answers and one.answer_tokens < 0.99 * plan.max_tokens:
            yield f"{one.url}: answers ended early, after {one.answer_tokens:.0f} tokens on average"
    if cores > BUSY_CORES:
        yield f"this client used {cores:.0%} of a core: it may be what limits the figures"


def run(client: httpx.Client, flags: argparse.Namespace) -> int:
    """Returns 0 when every server sent tokens under every load. Raises SettingError, ServerError."""
    for name in ("duration", "prompt_tokens", "max_tokens"):
        if not 1 <= (value := getattr(flags, name)) < float("inf"):
            raise SettingError(f"--{name.replace('_', '-')}", f"{value} is less than 1, or endless")
    if flags.json is not None:
        flags.json.open("ab").close()  # fails now, and not after a minute
    urls = [str(client.base_url).rstrip("/"), *([flags.against] if flags.against else [])]
    found, cores = asyncio.run(measure(urls, flags))
    show(found, flags, cores)
    if flags.json is not None:
        names = ("duration", "concurrency", "prompt_tokens", "max_tokens")
        plan = {name: getattr(flags, name) for name in names}
        figures = {"plan": plan, "figures": [one._asdict() for one in found]}
        flags.json.write_bytes(orjson.dumps(figures, option=orjson.OPT_INDENT_2))
    return 0 if all(one.tokens_per_s for one in found) else 1


def read_users(text: str) -> list[int]:
    """The numbers of users, of `1,8,32`. Raises SettingError."""
    with contextlib.suppress(ValueError):
        found = sorted({int(word) for word in text.split(",")})
        if found[0] >= 1 and found[-1] <= MAX_USERS:
            return found
    cause = f"{text!r} is not a list of numbers of users, each from 1 to {MAX_USERS}, such as 1,8,32"
    raise SettingError("--concurrency", cause)
