"""Any server of either API under 1, 8 and 32 streams: `python -m benchmarks.serve http://127.0.0.1:3000 [--runs 3]`.

The URL's path chooses the API: `/generate_stream` is TGI's (also when there is no path), `/v1/completions` OpenAI's. Distinct prompts
of about 128 tokens, 64 new tokens, greedy, end-of-sequence tokens ignored. The client shares the machine with the server.
"""

import argparse
import asyncio
import random
import statistics
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import uvloop

from benchmarks.client import Stream, stream

STREAMS = ((1, 4), (8, 24), (32, 64))
"""(streams at once, requests)"""
OUT_TOKENS = 64
WORDS = 104
VERBS = "carried measured described painted repaired followed questioned gathered counted remembered ignored compared".split()
NOUNS = "river engine teacher market garden letter bridge storm library soldier orchard machine captain village harbour".split()
ADJECTIVES = "quiet enormous broken modern distant careful golden ancient practical nervous bright frozen curious local".split()


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one run: tokens/s over all streams, and medians and 99th percentiles in ms."""

    tokens_per_s: float
    first_token_ms: float
    gap_ms: float
    gap_p99_ms: float


def prompt(seed: int) -> str:
    """About 128 tokens of plain English, different from the first word on for every seed."""
    draw, text = random.Random(seed), [f"Story {seed * 7919 % 10007}:"]
    while sum(len(sentence.split()) for sentence in text) < WORDS:
        first, second = (
            f"the {draw.choice(ADJECTIVES)} {draw.choice(NOUNS)} {draw.choice(VERBS)} a {draw.choice(NOUNS)}" for _ in range(2)
        )
        text.append(f"{first.capitalize()} because {second}.")
    return " ".join(text)


def request(url: str, seed: int, model: str, out_tokens: int) -> dict[str, Any]:
    if urlsplit(url).path.startswith("/v1"):
        fields = {"model": model, "stream": True, "temperature": 0, "max_tokens": out_tokens, "ignore_eos": True}
        return {"prompt": prompt(seed), "stream_options": {"include_usage": True}, **fields}
    return {"inputs": prompt(seed), "parameters": {"max_new_tokens": out_tokens, "ignore_eos": True, "details": True}}


def num_tokens(answer: Stream) -> int:
    usage = [frame["usage"]["completion_tokens"] for frame in answer.frames if frame.get("usage")]
    return int(usage[-1]) if usage else len(answer.frames)


async def load(url: str, streams: int, requests: int, model: str, seed: int, out_tokens: int = OUT_TOKENS) -> Figures:
    """Keeps `streams` running until `requests` have been answered."""
    queue = [request(url, seed * 1000 + i, model, out_tokens) for i in range(requests)]
    answers: list[Stream] = []

    async def user() -> None:
        while queue:
            answers.append(await stream(url, queue.pop()))

    began = time.monotonic()
    await asyncio.gather(*(user() for _ in range(streams)))
    seconds = time.monotonic() - began
    gaps = sorted(gap * 1e3 for answer in answers for gap in answer.gaps_s)
    return Figures(
        tokens_per_s=sum(map(num_tokens, answers)) / seconds,
        first_token_ms=statistics.median((answer.times_s[0] - answer.asked_s) * 1e3 for answer in answers),
        gap_ms=statistics.median(gaps),
        gap_p99_ms=gaps[int(len(gaps) * 0.99)],
    )


def median(runs: list[Figures]) -> Figures:
    return Figures(*(statistics.median(getattr(run, name) for run in runs) for name in Figures.__slots__))


async def measure(url: str, streams: int, requests: int, model: str, runs: int) -> Figures:
    return median([await load(url, streams, requests, model, seed) for seed in range(1, runs + 1)])


async def main(url: str, model: str, runs: int) -> None:
    await load(url, 4, 8, model, seed=0)
    for streams, requests in STREAMS:
        it = await measure(url, streams, requests, model, runs)
        print(
            f"{streams:3d} streams: {it.tokens_per_s:7.1f} tokens/s, first token {it.first_token_ms:6.0f} ms, "
            f"gap p50 {it.gap_ms:6.2f} ms, p99 {it.gap_p99_ms:6.1f} ms",
            flush=True,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--model", default="m")
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    target = args.url if urlsplit(args.url).path.strip("/") else args.url.rstrip("/") + "/generate_stream"
    uvloop.run(main(target, args.model, args.runs))
