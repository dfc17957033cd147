"""Prints what structured output costs: `python -m benchmarks.gpu.grammar [URL …] [--runs 3]`.

First the masks alone, computed as the engine does: milliseconds from a new schema to its first mask, and
microseconds of a mask where 1 and 32 rows want one.

Then prompts run with and without a JSON schema, 1 and 32 streams at a time, and take turns; every answer
fills its 64 tokens, because the schema wants a long list, and no prompt is sent twice. Printed are medians of
the runs: tokens/s with the schema as a share of those without, and the medians of time to first token and
between tokens. Without a URL a fleet is started; with URLs of OpenAI's API
(http://127.0.0.1:8000/v1/completions) these servers are measured, in turns.
"""

import argparse
import asyncio
import contextlib
import json
import statistics
import time
from collections.abc import Iterator
from typing import Any

import orjson

from api.grammar.compile import Grammar, compile_checked
from benchmarks.serve import OUT_TOKENS, Figures, answers_of, figures, load, median, request
from common import model_files
from gpu_worker.engine.batch.sampling_state import GrammarMask
from gpu_worker.engine.sampling.grammar import Matchers
from gpu_worker.engine.side_threads import SideThreads
from tests.support.fleet.fleet import Fleet

STREAMS = ((1, 4), (32, 64))
"""(streams at once, requests)"""
ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 24},
        "kind": {"enum": ["person", "place", "thing"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 999},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3},
    },
    "required": ["name", "kind", "age", "tags"],
    "additionalProperties": False,
}
SCHEMA: dict[str, Any] = {"type": "array", "items": ITEM, "minItems": 20}


EXAMPLE = [
    {"name": f"Ada number {i}", "kind": "person", "age": 7 * i, "tags": ["quiet", "bright"]}
    for i in range(20)
]
"""What the schema wants."""


def bodies(url: str, model: str, count: int, seed: int, structured: bool) -> list[dict[str, Any]]:
    """Requests whose prompts no other seed has; those with the schema have one of their own, so that a part
    of them is compiled anew.
    """
    found = [request(url, seed * 1000 + i, model, OUT_TOKENS) for i in range(count)]
    if structured:
        for i, body in enumerate(found):
            schema = numbered_schema(seed, i % 8)
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    return found


def numbered_schema(seed: int, number: int) -> dict[str, Any]:
    return SCHEMA | {"title": f"run {seed}, schema {number}"}


def measure_masks(model: str) -> None:
    """Prints the times of masks alone, of rows that write EXAMPLE."""
    directory = model_files.resolve(model)
    config = orjson.loads((directory / "config.json").read_bytes())
    matchers = Matchers(directory, config["vocab_size"], [config["eos_token_id"]], True, SideThreads())
    matchers.prepare()
    tokens = matchers.vocabulary.tokenize_str(json.dumps(EXAMPLE))
    first_ms: list[float] = []
    for rows in (1, 32):
        started, rest_us = [], []
        for number in range(rows):
            begun_s = time.perf_counter()
            text = json.dumps(numbered_schema(rows, number))
            started.append(matchers.start(compile_checked(Grammar("json", text, "schema")), []))
            matchers.compute(started[-1:])
            first_ms.append((time.perf_counter() - begun_s) * 1e3)
        rest_us = list(mask_us(matchers, started, tokens))
        print(f"masks of {rows} rows: {statistics.median(rest_us):.0f} µs a mask")
    print(f"a new schema's first mask: {statistics.median(first_ms):.1f} ms, {max(first_ms):.1f} at most")


def mask_us(matchers: Matchers, started: list[GrammarMask], tokens: list[int]) -> Iterator[float]:
    """Microseconds of each step's masks, for each row."""
    for token in tokens[:-1]:
        begun_s = time.perf_counter()
        for matcher in started:
            matcher.accept(token)
        matchers.compute(started)
        yield (time.perf_counter() - begun_s) * 1e6 / len(started)


async def measure(urls: list[str], model: str, runs: int) -> None:
    taken: dict[tuple[str, int, bool], list[Figures]] = {}
    for url in urls:
        await load(url, 4, 8, model, seed=0)
    for run in range(1, runs + 1):
        for url in urls:
            for streams, requests in STREAMS:
                for structured in (run % 2 == 0, run % 2 == 1):
                    queue = bodies(url, model, requests, 2 * run + structured, structured)
                    answers = await answers_of(url, queue, streams)
                    taken.setdefault((url, streams, structured), []).append(figures(answers))
    for url in urls:
        print(f"{url}: tokens/s, first token ms, between tokens ms: plain → with a schema")
        for streams, _ in STREAMS:
            plain, guided = (median(taken[url, streams, kind]) for kind in (False, True))
            print(
                f"  {streams:3} streams: {plain.tokens_per_s:.0f} → {guided.tokens_per_s:.0f} "
                f"({guided.tokens_per_s / plain.tokens_per_s:.2f}), "
                f"{plain.first_token_ms:.0f} → {guided.first_token_ms:.0f}, "
                f"{plain.gap_ms:.1f} → {guided.gap_ms:.1f}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("urls", nargs="*")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--model", default="smollm2")
    chosen = parser.parse_args()
    measure_masks(chosen.model)
    with contextlib.ExitStack() as stack:
        urls = chosen.urls
        if not urls:
            fleet = stack.enter_context(Fleet(kv_cache_bytes="256MiB"))
            urls = [f"{fleet.base_url}/v1/completions"]
        asyncio.run(measure(urls, chosen.model, chosen.runs))


if __name__ == "__main__":
    main()
