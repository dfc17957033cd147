"""Crowd: clients that keep a constant number of streams running, and check every answer."""

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field

import httpx

from benchmarks.client import HttpStatusError, StreamBroken
from tests.support.chaos.answers import Answer, Choice, RequestFailed, compare
from tests.support.chaos.cases import Case, Reader

AGAIN_S = 0.2
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
        choices: of all answers, with the names of their cases.
    """

    whole: Counter[str] = field(default_factory=Counter)
    resumed: Counter[str] = field(default_factory=Counter)
    cut: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    choices: list[tuple[str, Choice]] = field(default_factory=list)
    num_tokens: int = 0
    num_lost: int = 0
    num_added: int = 0


class Crowd:
    """Clients of one fleet.

    Attributes:
        expected: the undisturbed answer to each case, by its name.
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

        async def ask() -> None:
            while waiting:
                case = waiting.pop()
                self.expected[str(case)] = await self.learn_case(case)

        await asyncio.gather(*(ask() for _ in range(num_streams)))

    async def learn_case(self, case: Case) -> Answer:
        """Return the whole answer. A slow machine may refuse the first tries."""
        until_s = time.monotonic() + HUNG_S
        while True:
            answer = Answer()
            try:
                await self.reader.read(case, answer)
            except (HttpStatusError, *BROKEN):
                if time.monotonic() > until_s:
                    raise
                await asyncio.sleep(AGAIN_S)
            else:
                assert answer.ended(case.num_choices), f"{case}: {answer}"
                return answer

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
            await asyncio.sleep(AGAIN_S)

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
        self.tally.choices += [(str(case), choice) for choice in answer.choices.values()]
        if difference := compare(answer, self.expected[str(case)], is_cut):
            self.tally.num_lost += difference.num_lost
            self.tally.num_added += difference.num_added
            self.complain(case, difference.text)

    def complain(self, case: Case, text: str) -> None:
        self.tally.wrong.append(f"{case}: {text}")
        print(f"WRONG {time.strftime('%X')} {case}: {text}", flush=True)
