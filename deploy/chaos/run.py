"""Run: the undisturbed answers first, then streams under strikes."""

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field

from deploy.bench.load import prompt
from deploy.chaos.compare import Truth
from deploy.chaos.stream import Endpoint, ReceivedAnswer, Receiver
from deploy.chaos.strikes import StrikePlan, Striker
from deploy.cli.client import ServerError

FAILED_PAUSE_S = 1.0
"""A stream whose request failed sends its next one after this time: another request, not the same again."""
TRUTH_ROUNDS = 3
"""How often each undisturbed answer is taken. Those that differ are not compared."""


@dataclass(frozen=True, slots=True)
class ChaosPlan:
    """A run: `num_streams` users for `duration_s`, each with one request after the other.

    Attributes:
        prompt_words, num_prompts: how long the prompts are, and how many different ones there are.
        drop: share of the requests whose connection this client cuts once.
        seed: of prompts, their order, and cuts.
    """

    duration_s: float
    num_streams: int
    num_prompts: int
    prompt_words: int
    drop: float
    seed: int
    strikes: StrikePlan


@dataclass(slots=True)
class Recording:
    """What came of a run. Times are monotonic.

    Attributes:
        truths: by prompt; None where the undisturbed answers differ.
        undisturbed, answers: all answers before and under the strikes.
    """

    plan: ChaosPlan
    truths: list[Truth | None] = field(default_factory=list)
    undisturbed: list[ReceivedAnswer] = field(default_factory=list)
    answers: list[ReceivedAnswer] = field(default_factory=list)
    begun_s: float = 0.0
    ended_s: float = 0.0
    striker: Striker = field(init=False)

    def __post_init__(self) -> None:
        self.striker = Striker(self.plan.strikes)


async def run(endpoint: Endpoint, plan: ChaosPlan, show_stage: Callable[[str], None]) -> Recording:
    """Run a plan.

    Args:
        show_stage: gets the name of each part that begins.

    Raises:
        ServerError: an undisturbed request failed.
    """
    recording = Recording(plan)
    bodies = [
        endpoint.body(prompt(plan.seed * plan.num_prompts + i, plan.prompt_words))
        for i in range(plan.num_prompts)
    ]
    for number in range(TRUTH_ROUNDS):
        show_stage(f"undisturbed answers, {number + 1} of {TRUTH_ROUNDS}")
        recording.undisturbed += await answer_all(endpoint, bodies, plan, number)
    recording.truths = [find_truth(recording.undisturbed, i) for i in range(plan.num_prompts)]
    show_stage("strikes")
    await disturb(endpoint, bodies, recording)
    return recording


async def answer_all(
    endpoint: Endpoint, bodies: Sequence[bytes], plan: ChaosPlan, number: int
) -> list[ReceivedAnswer]:
    """Ask each prompt once, with as many streams as later. Their order differs from round to round, and so do
    the batches that a server makes of them.
    """
    left = random.Random(f"{plan.seed} {number}").sample(range(len(bodies)), len(bodies))
    answers: list[ReceivedAnswer] = []

    async def user(number: int) -> None:
        while left:
            answers.append(answer := ReceivedAnswer(left.pop(), number, time.monotonic()))
            await Receiver(endpoint, answer).receive(bodies[answer.prompt])
            if answer.error or not answer.frames:
                raise ServerError(f"an undisturbed request failed: {answer.error or 'its answer is empty'}")

    await in_parallel([user(i) for i in range(plan.num_streams)])
    return answers


def find_truth(answers: Sequence[ReceivedAnswer], index: int) -> Truth | None:
    """Return the undisturbed answer to a prompt, if it was always the same. The one with the most frames
    tells best where tokens begin.
    """
    found = [answer for answer in answers if answer.prompt == index]
    if len({answer.text for answer in found}) > 1:
        return None
    finest = max(found, key=lambda answer: len(answer.frames))
    return Truth(finest.frames, finest.num_tokens or len(finest.frames))


async def disturb(endpoint: Endpoint, bodies: Sequence[bytes], recording: Recording) -> None:
    """Run the streams and the strikes. Requests that run when the time is over are waited for."""
    plan = recording.plan
    draw = random.Random(plan.seed)
    recording.begun_s = time.monotonic()
    end_s = recording.begun_s + plan.duration_s
    lengths = [len(truth.frames) if truth else 2 for truth in recording.truths]

    async def user(number: int) -> None:
        while time.monotonic() < end_s:
            index = draw.randrange(len(bodies))
            cut_after = draw.randint(1, max(1, lengths[index] - 1)) if draw.random() < plan.drop else 0
            answer = ReceivedAnswer(index, number, time.monotonic())
            recording.answers.append(answer)
            await Receiver(endpoint, answer, cut_after).receive(bodies[index])
            if answer.error:
                await asyncio.sleep(FAILED_PAUSE_S)

    try:
        users = [user(i) for i in range(plan.num_streams)]
        await in_parallel([recording.striker.run(plan.duration_s), *users])
    finally:
        recording.ended_s = time.monotonic()
        recording.striker.note_failed_restarts()


async def in_parallel(jobs: Sequence[Coroutine[None, None, None]]) -> None:
    """Run all. Raises the ServerError of the first that fails, and ends the others."""
    try:
        async with asyncio.TaskGroup() as group:
            for job in jobs:
                group.create_task(job)
    except ExceptionGroup as errors:
        refused, _ = errors.split(ServerError)
        raise (refused or errors).exceptions[0] from None
