"""Prints what n-gram speculation wins: `python -m benchmarks.speculation [--runs 3] [--speculate 3,7]`.

Two tasks of 128 new tokens, greedy, at 1, 8 and 32 streams: `copy` writes a text of the prompt again, as
summaries and edits of code do in large part, and `story` goes on with a text that repeats little. There is a
fleet for each number of tokens that a step checks beyond a row's next, 0 among them; they take turns, and no
prompt is sent twice. Printed are medians of the runs: tokens/s, as a share of those without speculation, and
which share of the proposed tokens was right.
"""

import argparse
import asyncio
import contextlib
import urllib.request
from typing import Any

from benchmarks.serve import Figures, answers_of, figures, load, median, prompt, request
from tests.support.fleet.fleet import Fleet

STREAMS = ((1, 4), (8, 16), (32, 32))
"""(streams at once, requests)"""
TASKS = ("copy", "story")
OUT_TOKENS = 128
COUNTERS = ("tokenfleet_accepted_tokens", "tokenfleet_proposed_tokens")


def body(url: str, model: str, task: str, seed: int) -> dict[str, Any]:
    found = request(url, seed, model, OUT_TOKENS)
    if task == "copy":
        text = prompt(seed)
        found["prompt"] = f"{text}\n\nThe same text again, word by word:\n\n{text[: text.find('.') + 1]}"
    return found


def url_of(fleet: Fleet) -> str:
    return f"{fleet.base_url}/v1/completions"


def read_counters(fleet: Fleet) -> list[float]:
    """Tokens that were right, and tokens proposed, since the fleet's start."""
    with urllib.request.urlopen(f"{fleet.base_url}/metrics") as answer:
        lines = [line.split() for line in answer.read().decode().splitlines()]
    return [
        sum(float(words[1]) for words in lines if len(words) == 2 and words[0].startswith(name))
        for name in COUNTERS
    ]


async def measure(fleets: dict[int, Fleet], model: str, runs: int) -> None:
    for fleet in fleets.values():
        await load(url_of(fleet), 4, 8, model, seed=0)
    for task in TASKS:
        for streams, requests in STREAMS:
            before = {number: read_counters(fleet) for number, fleet in fleets.items()}
            taken: dict[int, list[Figures]] = {number: [] for number in fleets}
            for run in range(1, runs + 1):
                for number, fleet in fleets.items():
                    first = run * 10_000 + streams * 100
                    queue = [body(url_of(fleet), model, task, first + i) for i in range(requests)]
                    taken[number].append(figures(await answers_of(url_of(fleet), queue, streams)))
            plain = median(taken[0]).tokens_per_s
            for number, fleet in fleets.items():
                right, proposed = (
                    new - old for new, old in zip(read_counters(fleet), before[number], strict=True)
                )
                speed = median(taken[number]).tokens_per_s
                share = f"{right / proposed:.0%} right of {proposed:.0f}" if proposed else "nothing proposed"
                print(
                    f"{task}, {streams:2} streams, SPECULATE={number}: {speed:6.1f} tokens/s "
                    f"({speed / plain:.2f}), {share}",
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--speculate", default="3,7", help="numbers of tokens, with commas")
    parser.add_argument("--model", default="smollm2")
    chosen = parser.parse_args()
    numbers = (0, *map(int, chosen.speculate.split(",")))
    with contextlib.ExitStack() as stack:
        fleets = {
            number: stack.enter_context(Fleet(kv_cache_bytes="256MiB", speculate=number))
            for number in numbers
        }
        asyncio.run(measure(fleets, chosen.model, chosen.runs))


if __name__ == "__main__":
    main()
