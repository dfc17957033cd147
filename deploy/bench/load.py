"""Load: a number of concurrent users, each of which sends its next request when the last one is answered.

Prompts are plain English and differ from their first words on, so that no server's prefix cache helps.
"""

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

import httpx

from deploy.bench.measure import Round, Server, TimedAnswer, body, figures, send
from deploy.cli.client import ServerError

WORDS_PER_TOKEN = 0.8
"""Of these prompts, with usual tokenizers. The first answer says how many tokens they really have."""
MAX_TURNS = 2
"""Rounds of each load: ours, theirs, theirs, ours. A machine that becomes slower affects both servers."""
SETTLE_S = 0.3
"""Pause between two rounds, in which a server notices that its clients disconnected."""
RETRY_S = 0.2
MIN_ROUND_S = 0.5
SLOW_FIRST_TOKEN = 0.2
"""A server whose median time to first token is a larger part of a round than this gets longer rounds."""
VERBS = (
    "carried measured described painted repaired followed "
    "questioned gathered counted remembered ignored compared"
).split()
NOUNS = (
    "river engine teacher market garden letter bridge "
    "storm library soldier orchard machine captain village harbour"
).split()
ADJECTIVES = (
    "quiet enormous broken modern distant careful golden "
    "ancient practical nervous bright frozen curious local"
).split()


def prompt(seed: int, num_words: int) -> str:
    """Return a prompt of `num_words` words; the same seed gives the same prompt."""
    draw = random.Random(seed)
    words = ["Story", f"{draw.randrange(10**6)}:"]
    while len(words) < num_words:
        subject, other = draw.choice(ADJECTIVES).capitalize(), draw.choice(ADJECTIVES)
        words += [
            subject,
            f"{draw.choice(NOUNS)}s",
            draw.choice(VERBS),
            "the",
            other,
            f"{draw.choice(NOUNS)}.",
        ]
    return " ".join(words[: max(1, num_words)])


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The load of one benchmark, which takes `duration_s` in all."""

    duration_s: float
    concurrency: Sequence[int]
    prompt_tokens: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Target:
    """A server, the client to reach it by, and the route of its requests."""

    server: Server
    client: httpx.AsyncClient
    path: str


def schedule(num_servers: int, concurrency: Sequence[int], num_turns: int) -> list[tuple[int, int]]:
    """Return (users, server) of every round, in order. The server that begins alternates."""
    order = list(range(num_servers))
    rounds = [
        (users, order if (i + turn) % 2 == 0 else order[::-1])
        for i, users in enumerate(concurrency)
        for turn in range(num_turns)
    ]
    return [(users, server) for users, turn in rounds for server in turn]


def round_s(plan: LoadPlan, num_servers: int, num_turns: int) -> float:
    """Seconds of one round: all rounds and the warm-ups (one for each server) together take the duration."""
    num_rounds = num_servers * len(plan.concurrency) * num_turns
    return max(
        MIN_ROUND_S,
        (plan.duration_s - num_servers * warm_up_s(plan, num_servers)) / num_rounds - SETTLE_S,
    )


def warm_up_s(plan: LoadPlan, num_servers: int) -> float:
    """Seconds of one warm-up, with its pause."""
    return plan.duration_s / num_servers / (len(plan.concurrency) * MAX_TURNS + 1)


def choose_num_turns(warm: Sequence[Round]) -> int:
    """Choose one long round for each load, instead of two, if a server is slow with its first tokens."""
    medians = [figures([one]).first_p50_s for one in warm]
    slow = any(
        median is None or median > SLOW_FIRST_TOKEN * (one.ended_s - one.begun_s)
        for one, median in zip(warm, medians, strict=True)
    )
    return 1 if slow else MAX_TURNS


async def measure(
    targets: Sequence[Target], plan: LoadPlan, show_stage: Callable[[str, float], None]
) -> tuple[int | None, dict[tuple[int, int], list[Round]]]:
    """Measure every server under every load. Returns the mean length of the prompts in tokens, as the servers
    report it, and the rounds by (users, server).

    Args:
        show_stage: gets the name and the seconds of each round that begins.

    Raises:
        ServerError: a server does not answer its first request.
    """
    num_words, seed = round(plan.prompt_tokens * WORDS_PER_TOKEN), random.randrange(2**32)
    show_stage("asking for one token", 0.0)
    first = [await request_one_token(target, prompt(seed + i, num_words)) for i, target in enumerate(targets)]
    num_words = round(num_words * plan.prompt_tokens / (first[0].prompt_tokens or plan.prompt_tokens))
    warm = []
    for target in targets:
        texts = prompts(f"{seed} warm-up", num_words)
        show_stage(f"{target.server.name}: warming up", warm_up_s(plan, len(targets)))
        seconds = max(MIN_ROUND_S, warm_up_s(plan, len(targets)) - SETTLE_S)
        warm.append(await run_round(target, max(plan.concurrency), texts, plan.max_tokens, seconds))
    num_turns = choose_num_turns(warm)
    seconds = round_s(plan, len(targets), num_turns)
    rounds: dict[tuple[int, int], list[Round]] = {}
    for users, i in schedule(len(targets), plan.concurrency, num_turns):
        done = rounds.setdefault((users, i), [])
        show_stage(f"{targets[i].server.name}: {users} at once", seconds + SETTLE_S)
        texts = prompts(f"{seed} {users} {len(done)}", num_words)
        done.append(await run_round(targets[i], users, texts, plan.max_tokens, seconds))
    answers = [answer for done in rounds.values() for one in done for answer in one.answers]
    counts = [answer.prompt_tokens for answer in answers if answer.prompt_tokens]
    return (round(fmean(counts)) if counts else first[0].prompt_tokens), rounds


async def request_one_token(target: Target, text: str) -> TimedAnswer:
    """Request one token, without a time limit, to learn how long the prompt is. Raises ServerError."""
    answer = TimedAnswer(time.monotonic())
    try:
        await send(target.client, target.path, body(target.server, target.path, text, 1), answer)
    except ServerError as error:
        raise ServerError(
            f"{target.server.name} at {target.server.url} answers no request: {error}"
        ) from error
    return answer


def prompts(name: str, num_words: int) -> Iterator[str]:
    """Yield prompts without end; the same name gives the same prompts."""
    draw = random.Random(name)
    while True:
        yield prompt(draw.randrange(2**32), num_words)


async def run_round(
    target: Target, users: int, texts: Iterator[str], max_tokens: int, seconds: float
) -> Round:
    """Run one round. Requests that are unanswered at its end are cut off."""
    answers: list[TimedAnswer] = []

    async def user() -> None:
        while True:
            content = body(target.server, target.path, next(texts), max_tokens)
            answers.append(answer := TimedAnswer(time.monotonic()))
            try:
                await send(target.client, target.path, content, answer)
            except ServerError as error:
                answer.error = str(error)
                await asyncio.sleep(RETRY_S)

    begun_s = time.monotonic()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds), asyncio.TaskGroup() as group:
            for _ in range(users):
                group.create_task(user())
    ended_s = time.monotonic()
    await asyncio.sleep(SETTLE_S)
    return Round(begun_s, ended_s, answers)
