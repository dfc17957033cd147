"""Prints what placement by cached prefixes saves: `python -m benchmarks.batcher.prefix [--chats 300]`.

The scheduler runs alone, with four simulated workers: chats of eight turns, each with one of eight system
prompts of 512 tokens, come at random; a step takes 8 ms and 0.04 ms for each prompt token. The same trace is
placed by the scheduler and, with the same caches, in turn (round-robin). Load is the time that a worker's
rows run. Exit status 1 if placement computes more than half of the prompt tokens, or if the busiest worker
has more than 1.3 times the mean load.
"""

import argparse
import heapq
import itertools
import random
import sys
from dataclasses import dataclass, field
from unittest.mock import patch

from batcher.scheduling.placement import Placement
from batcher.scheduling.replica import Replica
from batcher.scheduling.sequence import Sequence
from common.messages.plan import WorkerCapacity
from tests.support.broker_state import make_capacity
from tests.support.fleet.simulated_pool import Pool, sharing_request
from tests.support.fleet.simulated_worker import generated_id

NUM_WORKERS, NUM_BLOCKS = 4, 6000
NUM_SYSTEMS, SYSTEM_TOKENS, TURNS = 8, 512, 8
MEAN_ANSWER, MAX_ANSWER = 96, 256
STEP_MS, TOKEN_MS, TICK_MS = 8.0, 0.04, 10.0
CHATS_PER_S, THINK_MS = 4.0, 4000.0
MOST_SHARE, MOST_LOAD = 0.5, 1.3


class TimedPool(Pool):
    """A pool of workers whose steps take time."""

    def __init__(self, seed: int) -> None:
        super().__init__(NUM_WORKERS, NUM_BLOCKS, seed, eos_chance=1 / MEAN_ANSWER)
        self.clocks_ms = dict.fromkeys(self.workers, 0.0)
        self.load = dict.fromkeys(self.workers, 0.0)
        self.first_ms: dict[str, float] = {}

    def capacity(self, name: str) -> WorkerCapacity:
        return make_capacity(name, NUM_BLOCKS, name=name, prefix_caching=True)

    def run_until(self, now_ms: float) -> None:
        """Run the steps that begin before this time, then report."""
        self.decide()
        for name, worker in self.workers.items():
            while self.clocks_ms[name] < now_ms:
                before, rows, began_ms = worker.num_prefilled, len(worker.rows), self.clocks_ms[name]
                if not worker.run():
                    self.clocks_ms[name] = now_ms
                    break
                self.clocks_ms[name] += STEP_MS + TOKEN_MS * (worker.num_prefilled - before)
                self.load[name] += rows * (self.clocks_ms[name] - began_ms)
                if worker.num_prefilled > before:
                    new = worker.committed.keys() - self.first_ms.keys()
                    self.first_ms |= dict.fromkeys(new, self.clocks_ms[name])
            worker.release()
            self.committed |= worker.committed
            self.scheduler.apply_report(name, worker.take_report())


@dataclass
class Chat:
    number: int
    prompt: list[int]
    turn: int = 0


@dataclass
class Outcome:
    prefilled: int = 0
    load: float = 0.0
    first_ms: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        first = sorted(self.first_ms)
        p50, p99 = first[len(first) // 2], first[len(first) * 99 // 100]
        tokens = f"{self.prefilled:9,} prompt tokens computed, max/mean load {self.load:.2f}"
        return f"{tokens}, time to first token p50 {p50:.0f} ms, p99 {p99:.0f} ms"


def make_chats(draw: random.Random, count: int) -> list[tuple[float, int, Chat]]:
    """Return (time in ms, number, chat) of chats that come at random."""
    chats, at_ms = [], 0.0
    for number in range(count):
        at_ms += draw.expovariate(CHATS_PER_S) * 1000
        begin = draw.randrange(NUM_SYSTEMS) * SYSTEM_TOKENS
        chats.append((at_ms, number, Chat(number, [*range(begin, begin + SYSTEM_TOKENS)])))
    return chats


def play(count: int, seed: int) -> Outcome:
    """Run all chats to their end."""
    draw, pool, outcome = random.Random(seed), TimedPool(seed), Outcome()
    due = make_chats(draw, count)
    running: dict[str, tuple[Chat, Sequence, float]] = {}
    now_ms = 0.0
    while due or running:
        now_ms += TICK_MS
        while due and due[0][0] <= now_ms:
            at_ms, number, chat = heapq.heappop(due)
            question = 100_000 + 1000 * number + 100 * chat.turn
            chat.prompt += range(question, question + 20 + number % 60)
            name, entry = f"c{number}-{chat.turn}", len(outcome.first_ms) + len(running)
            running[name] = chat, sharing_request(name, list(chat.prompt), MAX_ANSWER, entry), at_ms
            pool.add(running[name][1])
        pool.run_until(now_ms)
        pool.decide()
        for name in pool.finished:
            chat, _, at_ms = running.pop(name)
            outcome.first_ms.append(pool.first_ms[name] - at_ms)
            chat.prompt += map(generated_id, range(pool.committed[name]))
            chat.turn += 1
            if chat.turn < TURNS:
                heapq.heappush(due, (now_ms + draw.expovariate(1 / THINK_MS), chat.number, chat))
        pool.finished.clear()
    outcome.prefilled = sum(worker.num_prefilled for worker in pool.workers.values())
    outcome.load = max(pool.load.values()) * NUM_WORKERS / sum(pool.load.values())
    return outcome


def in_turn() -> object:
    """Return a placement that gives each worker a request in turn."""
    numbers = itertools.count()

    def choose(
        placement: Placement, sequence: Sequence, knowing: list[Replica]
    ) -> tuple[Replica | None, None]:
        able = [replica for replica in placement.rows if replica.can_start(sequence)]
        return (able[next(numbers) % len(able)] if able else None), None

    return choose


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--chats", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    by_hits = play(args.chats, args.seed)
    with patch.object(Placement, "choose", in_turn()):
        round_robin = play(args.chats, args.seed)
    print(f"by hits:     {by_hits}\nround-robin: {round_robin}")
    share = by_hits.prefilled / round_robin.prefilled
    print(f"{1 / share:.2f} times fewer prompt tokens")
    return int(share > MOST_SHARE or by_hits.load > MOST_LOAD)


if __name__ == "__main__":
    sys.exit(main())
