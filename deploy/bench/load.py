"""The load: so many users at once, each asking again as soon as it is answered, both servers in turn."""

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import httpx

from deploy.bench.ask import TimedAnswer, ask, body, encode
from deploy.bench.figures import Round, figures
from deploy.bench.prompts import WORDS_PER_TOKEN, prompt
from deploy.bench.servers import Server
from deploy.commands.client import Trouble

MAX_TURNS = 2
"""Of each load: ours, theirs, theirs, ours. What drifts on the machine meets both."""
SETTLE_S = 0.3
"""Between two rounds, so that a server sees that its clients are gone."""
RETRY_S = 0.2
MIN_ROUND_S = 0.5
SLOW = 0.2


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be measured; `duration_s` is for all of it together."""

    duration_s: float
    concurrency: Sequence[int]
    prompt_tokens: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Target:
    """A server, the client to reach it by, and the route that is asked."""

    server: Server
    client: httpx.AsyncClient
    path: str


def schedule(num_servers: int, concurrency: Sequence[int], num_turns: int) -> list[tuple[int, int]]:
    """(users, server) of every round, in order; who begins changes from turn to turn."""
    order = list(range(num_servers))
    turns = [
        (users, order if (i + turn) % 2 == 0 else order[::-1])
        for i, users in enumerate(concurrency)
        for turn in range(num_turns)
    ]
    return [(users, server) for users, turn in turns for server in turn]


def round_s(wanted: Wanted, num_servers: int, num_turns: int) -> float:
    """Of one round, so that all of them and the warm-up (one short one for each server) take the duration."""
    num_rounds = num_servers * len(wanted.concurrency) * num_turns
    return max(
        MIN_ROUND_S, (wanted.duration_s - num_servers * warm_s(wanted, num_servers)) / num_rounds - SETTLE_S
    )


def warm_s(wanted: Wanted, num_servers: int) -> float:
    """Of one warm-up, with its pause."""
    return wanted.duration_s / num_servers / (len(wanted.concurrency) * MAX_TURNS + 1)


def turns(warm: Sequence[Round]) -> int:
    """Number of rounds: one, twice as long, where a server takes much of a round for its first tokens."""
    medians = [figures([one]).first_p50_s for one in warm]
    slow = any(
        median is None or median > SLOW * (one.ended_s - one.begun_s)
        for one, median in zip(warm, medians, strict=True)
    )
    return 1 if slow else MAX_TURNS


async def measure(
    targets: Sequence[Target], wanted: Wanted, say: Callable[[str, float], None]
) -> tuple[int | None, dict[tuple[int, int], list[Round]]]:
    """Mean prompt tokens by the servers' word, and the rounds by (users, server). `say` hears what each round
    is, and how long.

    Raises Trouble when a server does not answer its first request.
    """
    num_words, seed = round(wanted.prompt_tokens * WORDS_PER_TOKEN), random.randrange(2**32)
    say("asking for one token", 0.0)
    first = [await greet(target, prompt(seed + i, num_words)) for i, target in enumerate(targets)]
    num_words = round(num_words * wanted.prompt_tokens / (first[0].prompt_tokens or wanted.prompt_tokens))
    warm = []
    for target in targets:
        texts = prompts(f"{seed} warm-up", num_words)
        say(f"{target.server.name}: warming up", warm_s(wanted, len(targets)))
        seconds = max(MIN_ROUND_S, warm_s(wanted, len(targets)) - SETTLE_S)
        warm.append(await drive(target, max(wanted.concurrency), texts, wanted.max_tokens, seconds))
    num_turns = turns(warm)
    seconds = round_s(wanted, len(targets), num_turns)
    rounds: dict[tuple[int, int], list[Round]] = {}
    for users, i in schedule(len(targets), wanted.concurrency, num_turns):
        done = rounds.setdefault((users, i), [])
        say(f"{targets[i].server.name}: {users} at once", seconds + SETTLE_S)
        texts = prompts(f"{seed} {users} {len(done)}", num_words)
        done.append(await drive(targets[i], users, texts, wanted.max_tokens, seconds))
    means = [mean for done in rounds.values() for one in done if (mean := counted(one))]
    return (round(sum(means) / len(means)) if means else first[0].prompt_tokens), rounds


async def greet(target: Target, text: str) -> TimedAnswer:
    """One token, however long it takes: says how long the prompt is. Raises Trouble when there is no use in
    going on.
    """
    answer = TimedAnswer(time.monotonic())
    try:
        await ask(target.client, target.path, encode(body(target.server, target.path, text, 1)), answer)
    except Trouble as trouble:
        raise Trouble(
            f"{target.server.name} at {target.server.url} answers no request: {trouble}"
        ) from trouble
    return answer


def counted(one: Round) -> float | None:
    """Mean length of the prompts, by the word of the server."""
    told = [answer.prompt_tokens for answer in one.answers if answer.prompt_tokens]
    return sum(told) / len(told) if told else None


def prompts(name: str, num_words: int) -> Iterator[str]:
    """Without end; the same for the same name."""
    draw = random.Random(name)
    while True:
        yield prompt(draw.randrange(2**32), num_words)


async def drive(target: Target, users: int, texts: Iterator[str], max_tokens: int, seconds: float) -> Round:
    """One round. Who is not answered at its end is cut off."""
    answers: list[TimedAnswer] = []

    async def user() -> None:
        while True:
            content = encode(body(target.server, target.path, next(texts), max_tokens))
            answers.append(answer := TimedAnswer(time.monotonic()))
            try:
                await ask(target.client, target.path, content, answer)
            except Trouble as trouble:
                answer.error = str(trouble)
                await asyncio.sleep(RETRY_S)

    begun_s = time.monotonic()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds), asyncio.TaskGroup() as group:
            for _ in range(users):
                group.create_task(user())
    ended_s = time.monotonic()
    await asyncio.sleep(SETTLE_S)
    return Round(begun_s, ended_s, answers)
