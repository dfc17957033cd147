"""Prints throughput and latency of a server at 1, 8 and 32 streams: `python -m benchmarks.serve URL`.

The server may be any that has TGI's or OpenAI's API; the path of the URL, such as http://127.0.0.1:3000,
chooses it: `/generate_stream` is TGI's (also when there is no path), `/v1/completions` OpenAI's. The load is
distinct prompts of about 128 tokens, 64 new tokens, greedy (`--sampled`: temperature 0.8, top_p 0.95),
end-of-sequence tokens ignored. The client shares the machine with the server.

`--load 32,128,512,256` (may be repeated) is 32 streams and 128 requests, of about 512 tokens in and 256 out,
instead; `--processes` clients share the streams. It then prints figures under the names of vLLM's
`bench serve`, which `benchmarks/gpu/report.py` reads.
"""

import argparse
import asyncio
import random
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any
from urllib.parse import urlsplit

import uvloop

from benchmarks.client import Stream, stream

STREAMS = ((1, 4), (8, 24), (32, 64))
"""(streams at once, requests)"""
OUT_TOKENS = 64
SAMPLED = {"temperature": 0.8, "top_p": 0.95}
FAR_SEED = 100_000
"""More than a load has requests."""
WORDS = 104
WORDS_PER_TOKEN = WORDS / 128
VERBS = (
    "carried measured described painted repaired followed "
    "questioned gathered counted remembered ignored compared"
).split()
NOUNS = (
    "river engine teacher market garden letter bridge storm "
    "library soldier orchard machine captain village harbour"
).split()
ADJECTIVES = (
    "quiet enormous broken modern distant careful golden "
    "ancient practical nervous bright frozen curious local"
).split()


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of one run: tokens/s over all streams, and medians and 99th percentiles in ms.

    Attributes:
        token_ms: of an answer's tokens after the first, its time divided by their number. Tokens that come
            together, as those of two steps may, have no gap between them.
    """

    tokens_per_s: float
    first_token_ms: float
    first_token_p99_ms: float
    gap_ms: float
    gap_p99_ms: float
    token_ms: float = 0.0

    @classmethod
    def of(cls, tokens_per_s: float, firsts_ms: Sequence[float], gaps_ms: Sequence[float]) -> "Figures":
        """Sums up the times to first token, and those between tokens."""
        return cls(
            tokens_per_s,
            statistics.median(firsts_ms),
            percentile(firsts_ms, 0.99),
            statistics.median(gaps_ms),
            percentile(gaps_ms, 0.99),
        )


def prompt(seed: int, words: int = WORDS) -> str:
    """About 128 tokens of plain English, different from the first word on for every seed."""
    draw, text, num_words = random.Random(seed), [f"Story {seed * 7919 % 10007}:"], 2
    while num_words < words:
        first, second = (
            f"the {draw.choice(ADJECTIVES)} {draw.choice(NOUNS)} {draw.choice(VERBS)} a {draw.choice(NOUNS)}"
            for _ in range(2)
        )
        text.append(f"{first.capitalize()} because {second}.")
        num_words += len(text[-1].split())
    return " ".join(text)


def request(
    url: str, seed: int, model: str, out_tokens: int, words: int = WORDS, sampled: bool = False
) -> dict[str, Any]:
    sampling = SAMPLED if sampled else {}  # without seeds: vLLM 0.32 on CPU dies of rows that have some
    if urlsplit(url).path.startswith("/v1"):
        fields = {
            "model": model,
            "stream": True,
            "temperature": 0,
            "max_tokens": out_tokens,
            "ignore_eos": True,
        } | sampling
        return {"prompt": prompt(seed, words), "stream_options": {"include_usage": True}, **fields}
    parameters = {
        "max_new_tokens": out_tokens,
        "ignore_eos": True,
        "details": True,
        "do_sample": sampled,
    } | sampling
    return {"inputs": prompt(seed, words), "parameters": parameters}


def num_tokens(answer: Stream) -> int:
    usage = [frame["usage"]["completion_tokens"] for frame in answer.frames if frame.get("usage")]
    return int(usage[-1]) if usage else len(answer.frames)


async def load(
    url: str,
    streams: int,
    requests: int,
    model: str,
    seed: int,
    out_tokens: int = OUT_TOKENS,
    sampled: bool = False,
) -> Figures:
    """Keeps `streams` running until `requests` have been answered."""
    bodies = [request(url, seed * 1000 + i, model, out_tokens, sampled=sampled) for i in range(requests)]
    return figures(await answers_of(url, bodies, streams))


async def answers_of(url: str, queue: list[dict[str, Any]], streams: int) -> list[Stream]:
    """Sends all requests of the queue, `streams` at a time."""
    answers: list[Stream] = []

    async def user() -> None:
        while queue:
            answers.append(await stream(url, queue.pop()))

    await asyncio.gather(*(user() for _ in range(streams)))
    return answers


def figures(answers: Sequence[Stream]) -> Figures:
    seconds = max(answer.times_s[-1] for answer in answers) - min(answer.sent_s for answer in answers)
    firsts = [(answer.times_s[0] - answer.sent_s) * 1e3 for answer in answers]
    gaps = [gap * 1e3 for answer in answers for gap in answer.gaps_s]
    return replace(
        Figures.of(sum(map(num_tokens, answers)) / seconds, firsts, gaps),
        token_ms=statistics.median(
            (answer.times_s[-1] - answer.times_s[0]) * 1e3 / max(1, num_tokens(answer) - 1)
            for answer in answers
        ),
    )


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that this share of them does not exceed."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def run_load(
    url: str, model: str, numbers: tuple[int, int, int, int], processes: int, sampled: bool
) -> Figures:
    """Runs a load (streams, requests, tokens in and out), shared among processes: one alone receives some
    30,000 tokens/s at most.
    """
    streams, requests, in_tokens, out_tokens = numbers
    # no load finds prompts of another one in a prefix cache
    first = (2 * (in_tokens * 1024 + streams) + sampled) * FAR_SEED
    bodies = [
        request(url, first + i, model, out_tokens, max(1, int(in_tokens * WORDS_PER_TOKEN)), sampled)
        for i in range(requests)
    ]
    shares = min(processes, streams)
    jobs = [
        (url, bodies[share::shares], streams // shares + (share < streams % shares))
        for share in range(shares)
    ]
    with ProcessPoolExecutor(shares, get_context("spawn")) as pool:
        return figures([answer for answers in pool.map(share_of, jobs) for answer in answers])


def share_of(job: tuple[str, list[dict[str, Any]], int]) -> list[Stream]:
    """Runs a share of the load in a process of its own. Returns only what figures need of each frame."""
    answers = uvloop.run(answers_of(*job))
    return [
        Stream(answer.sent_s, [{"usage": {"completion_tokens": num_tokens(answer)}}], answer.times_s)
        for answer in answers
    ]


def median(runs: list[Figures]) -> Figures:
    return Figures(*(statistics.median(getattr(run, name) for run in runs) for name in Figures.__slots__))


async def measure(url: str, streams: int, requests: int, model: str, runs: int, sampled: bool) -> Figures:
    return median(
        [await load(url, streams, requests, model, seed, sampled=sampled) for seed in range(1, runs + 1)]
    )


async def main(url: str, model: str, runs: int, sampled: bool) -> None:
    await load(url, 4, 8, model, seed=0)
    for streams, requests in STREAMS:
        result = await measure(url, streams, requests, model, runs, sampled)
        print(
            f"{streams:3d} streams: {result.tokens_per_s:7.1f} tokens/s, "
            f"first token p50 {result.first_token_ms:6.0f} ms, p99 {result.first_token_p99_ms:6.0f} ms, "
            f"gap p50 {result.gap_ms:6.2f} ms, p99 {result.gap_p99_ms:6.1f} ms",
            flush=True,
        )


def report(
    url: str, model: str, loads: Sequence[tuple[int, int, int, int]], processes: int, sampled: bool
) -> None:
    uvloop.run(load(url, 4, 8, model, seed=0, out_tokens=16))
    for numbers in loads:
        result = run_load(url, model, numbers, processes, sampled)
        head = "streams={0} in={2} out={3}".format(*numbers) + " sampled" * sampled
        print(f"{head} | Output token throughput (tok/s): {result.tokens_per_s:.2f}")
        print(f"{head} | Median TTFT (ms): {result.first_token_ms:.2f}")
        print(f"{head} | P99 TTFT (ms): {result.first_token_p99_ms:.2f}")
        print(f"{head} | Median TPOT (ms): {result.token_ms:.2f}")
        print(f"{head} | Median ITL (ms): {result.gap_ms:.2f}")
        print(f"{head} | P99 ITL (ms): {result.gap_p99_ms:.2f}", flush=True)


def load_of(text: str) -> tuple[int, int, int, int]:
    streams, requests, in_tokens, out_tokens = map(int, text.split(","))
    return streams, requests, in_tokens, out_tokens


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url")
    parser.add_argument("--model", default="m")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--load", type=load_of, action="append", metavar="STREAMS,REQUESTS,IN,OUT")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--sampled", action="store_true")
    args = parser.parse_args()
    target = args.url if urlsplit(args.url).path.strip("/") else args.url.rstrip("/") + "/generate_stream"
    if args.load:
        report(target, args.model, args.load, args.processes, args.sampled)
    else:
        uvloop.run(main(target, args.model, args.runs, args.sampled))
