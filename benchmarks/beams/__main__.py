"""Prints what a beam search costs: `python -m benchmarks.beams [--runs 5] [--width 4] [--tokens 64]`.

One engine in this process, of SmolLM2, runs a beam search and as many independent greedy rows as it has
beams; transformers' `generate` runs the same beam search. All compute in float32, and take turns. Printed
are medians of the runs: tokens/s of all beams or rows together, prefill included, and ms of CPU a token,
which say more on a busy machine.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from common import model_files
from common.messages.request import BeamParams
from common.settings.settings import Settings
from gpu_worker.engine.engine import Engine
from gpu_worker.protocol import StartRow
from tests.support.engine.batch_player import Player
from tests.support.engine.reference import prompt_ids
from tests.support.prompts import PROMPTS

PROMPT = PROMPTS[20]


def play(engine: Engine, num_tokens: int, make_starts: Callable[[Player], list[StartRow]]) -> None:
    """Run rows with blocks for all their tokens."""
    player = Player(engine, list(range(1, engine.ready.num_blocks + 1)), until=engine.rows.step)
    player.run(make_starts(player), horizon=num_tokens + 2, lead=num_tokens)


def search(engine: Engine, prompt: Sequence[int], width: int, num_tokens: int) -> None:
    def starts(player: Player) -> list[StartRow]:
        return [player.start(1, prompt, num_tokens, beams=BeamParams(width), ignore_eos=True)]

    play(engine, num_tokens, starts)


def run_rows(engine: Engine, prompt: Sequence[int], width: int, num_tokens: int) -> None:
    def starts(player: Player) -> list[StartRow]:
        return [player.start(row, prompt, num_tokens, ignore_eos=True) for row in range(width)]

    play(engine, num_tokens, starts)


def generate(model: Any, prompt: Sequence[int], width: int, num_tokens: int) -> None:
    ids = torch.tensor([prompt])
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        num_beams=width,
        num_return_sequences=width,
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
    )


def seconds(run: Callable[[], None]) -> tuple[float, float]:
    """Run it → seconds on the clock, and of CPU."""
    started_s, started_cpu_s = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - started_s, time.process_time() - started_cpu_s


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    path = model_files.resolve("smollm2", dtype="float32")
    engine = Engine(Settings(model_id="smollm2", dtype="float32", kv_cache_bytes=2**28))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    [prompt], width, num_tokens = prompt_ids([PROMPT]), options.width, options.tokens
    ways: dict[str, Callable[[], None]] = {
        "beam search": lambda: search(engine, prompt, width, num_tokens),
        "rows": lambda: run_rows(engine, prompt, width, num_tokens),
        "transformers": lambda: generate(model, prompt, width, num_tokens),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for run in range(options.runs + 1):  # the first one warms up
        for name, way in ways.items():
            taken = seconds(way)
            times[name] += [taken] if run else []
    for name, runs in times.items():
        clock_s, cpu_s = (median(column) for column in zip(*runs, strict=True))
        count = width * num_tokens
        print(f"{name:14}{count / clock_s:8.1f} tokens/s{1000 * cpu_s / count:8.2f} ms of CPU a token")


if __name__ == "__main__":
    main()
