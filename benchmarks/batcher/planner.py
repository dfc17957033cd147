"""Prints forecasts of `tokenfleet plan` beside a real run: `python -m benchmarks.batcher.planner [--rps 2]`.

A fleet of one worker with the default model is watched under closed loads of 1 to 12 streams, and its step
costs are learnt. Then requests arrive at random, as the forecast has them. Exit status 1 if one of the
figures is further than 15% from its forecast. A second forecast has the step costs of the run itself: it
tells what the machine did meanwhile from what the simulation leaves out.
"""

import argparse
import asyncio
import json
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict

from batcher.planning.forecast import Forecast, forecast, percentile
from batcher.planning.learn import learn
from batcher.planning.load_trace import TracedRequest, draw_trace
from batcher.planning.step_costs import StepCosts
from benchmarks.client import Stream, stream
from benchmarks.serve import WORDS_PER_TOKEN, load, request
from tests.support.fleet.fleet import Fleet

STREAMS = (1, 2, 4, 8, 12)
SPREAD, MOST_OFF = 0.5, 0.15
FIGURES = ("first_token_p50_ms", "first_token_p99_ms", "gap_p50_ms", "gap_p99_ms", "tokens_per_s")


class Learning:
    """Learns a fleet's costs in a thread."""

    def __init__(self, fleet: Fleet, seconds: float) -> None:
        self.found: list[StepCosts] = []
        self.thread = threading.Thread(target=self.run, args=(fleet.base_url, seconds))
        self.thread.start()

    def run(self, url: str, seconds: float) -> None:
        self.found.append(learn(url, seconds, None))

    def costs(self) -> StepCosts:
        self.thread.join()
        print(json.dumps(asdict(self.found[0])), flush=True)
        return self.found[0]


def learn_under_load(fleet: Fleet, seconds: float) -> StepCosts:
    """Learn the fleet's costs while it has closed loads, one after the other."""
    url = f"{fleet.base_url}/generate_stream"
    asyncio.run(load(url, 2, 2, "m", seed=0))
    end_s, learning, seed = time.monotonic() + seconds, Learning(fleet, seconds), 1000
    for streams in STREAMS * 1000:
        if time.monotonic() > end_s:
            break
        asyncio.run(load(url, streams, streams, "m", seed=seed))
        seed += streams
    return learning.costs()


async def replay(fleet: Fleet, trace: Sequence[TracedRequest]) -> list[Stream]:
    """Send each request when it is due, however many run."""
    url = f"{fleet.base_url}/generate_stream"
    begun_s = time.monotonic()

    async def send(number: int, one: TracedRequest) -> Stream:
        words = round(one.prompt_tokens * WORDS_PER_TOKEN)
        body = request(url, 50_000 + number, "m", one.output_tokens, words)
        await asyncio.sleep(begun_s + one.arrival_ms / 1e3 - time.monotonic())
        return await stream(url, body)

    return await asyncio.gather(*(send(i, one) for i, one in enumerate(trace)))


def measured(answers: Sequence[Stream]) -> dict[str, float]:
    firsts = sorted(1e3 * (one.times_s[0] - one.sent_s) for one in answers)
    gaps = sorted(1e3 * gap for one in answers for gap in one.gaps_s)
    seconds = max(one.times_s[-1] for one in answers) - min(one.sent_s for one in answers)
    tokens = sum(len(one.times_s) for one in answers)
    values = [
        percentile(firsts, 0.5),
        percentile(firsts, 0.99),
        percentile(gaps, 0.5),
        percentile(gaps, 0.99),
    ]
    return dict(zip(FIGURES, [*values, tokens / seconds], strict=True))


def show(foreseen: Forecast, found: dict[str, float]) -> bool:
    """Print both. Returns whether they are near."""
    near = True
    for name in FIGURES:
        expected = getattr(foreseen, name)
        off = expected / found[name] - 1
        near = near and abs(off) <= MOST_OFF
        print(f"  {name:20} foreseen {expected:8.1f}  measured {found[name]:8.1f}  {off:+.1%}")
    return near


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rps", type=float, action="append")
    parser.add_argument("--learn-s", type=float, default=30.0)
    parser.add_argument("--duration", type=float, default=60.0)
    parser.add_argument("--tokens", type=int, nargs=2, default=(128, 64), metavar=("IN", "OUT"))
    flags = parser.parse_args()
    near = True
    with Fleet() as fleet:
        costs = learn_under_load(fleet, flags.learn_s)
        for rps in flags.rps or [2.0]:
            trace = draw_trace(rps, flags.duration, flags.tokens[0], flags.tokens[1], SPREAD, seed=1)
            learning = Learning(fleet, flags.duration)
            found = measured(asyncio.run(replay(fleet, trace)))
            print(f"{rps:g} requests a second, {flags.tokens[0]} in, {flags.tokens[1]} out:", flush=True)
            near = show(forecast(costs, trace, 1, None), found) and near
            print("the same with the step costs of the run itself:", flush=True)
            show(forecast(learning.costs(), trace, 1, None), found)
    return int(not near)


if __name__ == "__main__":
    sys.exit(main())
