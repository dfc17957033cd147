"""64 clients ask without a pause while gateways are killed: no answer is cut, and none is wrong."""

import asyncio
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator
from itertools import cycle
from typing import Any

import pytest

from deploy.launcher.embedded_broker import Broker
from tests.support.clients.talk import Talk
from tests.support.fleet.kept_gateways import KeptGateways, kept_gateways
from tests.support.fleet.kept_requests import STREAMED, WHOLE
from tests.support.fleet.scripted_batcher import batching
from tests.support.fleet.scripted_worker import Answer, working
from tests.support.tokenizer import TOKENIZER, ids
from tests.support.waiting import wait_until

ANSWER = Answer(ids(" one two é🙂 three four five" * 20))
NUM_CLIENTS, NUM_KILLS = 64, 40
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM)
Request = tuple[str, dict[str, Any]]
REFUSAL = re.compile(rb"HTTP/1.1 (429|503) ")


class Clients:
    """Clients that send one request after another.

    Attributes:
        outcomes: counts of answers: whole, wrong, cut; and of requests that were not admitted.
        undisturbed: what each kind of request is answered.
    """

    def __init__(self, port: int, count: int, draw: random.Random) -> None:
        self.port, self.count, self.draw = port, count, draw
        self.requests: Iterator[Request] = cycle([*STREAMED, *WHOLE])
        self.outcomes: Counter[str] = Counter()
        self.undisturbed: dict[str, bytes] = {}
        self.talks: set[Talk] = set()
        self.ended = False

    async def learn(self) -> None:
        for request in [*STREAMED, *WHOLE]:
            self.undisturbed[str(request)] = await Talk(self.port, *request).run()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for i in range(self.count):
                tasks.create_task(self.ask_forever(slow=i % 3 == 0))

    async def ask_forever(self, slow: bool) -> None:
        while not self.ended:
            request = next(self.requests)
            talk = Talk(self.port, *request, slow=slow)
            self.talks.add(talk)
            try:
                self.note(request, await talk.run())
            except OSError as error:
                self.outcomes[f"not taken: {type(error).__name__}" if not talk.seen else "cut"] += 1
            except AssertionError:
                self.outcomes["cut" if talk.seen else "not taken: closed"] += 1
            self.talks.discard(talk)

    def note(self, request: Request, answer: bytes) -> None:
        refusal = REFUSAL.match(answer)
        if answer == self.undisturbed[str(request)]:
            self.outcomes["whole"] += 1
        elif refusal:
            self.outcomes[f"refused: {refusal[1].decode()}"] += 1
        else:
            self.outcomes["wrong"] += 1
            print(f"WRONG {request}: {answer[-600:]!r}", flush=True)

    @property
    def num_in_their_middle(self) -> int:
        return sum(bool(talk.seen) for talk in self.talks)


async def kill_some(gateways: KeptGateways, clients: Clients) -> None:
    kinds: Counter[str] = Counter()
    hit, began_s = 0, time.monotonic()
    for _ in range(NUM_KILLS):
        number = clients.draw.choice(SIGNALS)
        hit += clients.num_in_their_middle
        await gateways.end(clients.draw.choice(gateways.processes), number)
        kinds[number.name] += 1
        await gateways.all_ready()
        await asyncio.sleep(clients.draw.random())
    clients.ended = True
    described = ", ".join(f"{count} {name}" for name, count in kinds.items())
    print(
        f"{described} in {time.monotonic() - began_s:.0f} s; {hit} times an answer was in its middle at one"
    )


@pytest.mark.slow
@pytest.mark.timeout(1500)
async def test_no_answer_is_cut_by_any_number_of_kills(broker: Broker) -> None:
    """A third of the clients read slowly. Only connections that no gateway has taken yet, and requests that
    are not admitted yet, are lost with a gateway.
    """
    async with (
        working(broker.url, TOKENIZER, lambda _: ANSWER, step_s=0.0) as worker,
        batching(broker.url),
        kept_gateways(broker.url, 3, MAX_CONCURRENT_REQUESTS="1000") as gateways,
    ):
        clients = Clients(gateways.port, NUM_CLIENTS, random.Random(5))
        await clients.learn()
        worker.step_s = 0.05
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(clients.run())
            tasks.create_task(kill_some(gateways, clients))
        print(f"{NUM_CLIENTS} clients, answers: {dict(clients.outcomes)}")
        assert clients.outcomes["whole"] > NUM_CLIENTS
        assert not clients.outcomes["cut"] and not clients.outcomes["wrong"]
        await wait_until(lambda: not gateways.keeper.kept)
