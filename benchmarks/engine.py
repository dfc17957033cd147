"""Prints the speed of the engine alone: `python -m benchmarks.engine [--rows 1,8] [--contexts 128]`.

The engine runs in this process, with all cores; flags of the settings work, too. Printed are tokens/s and
milliseconds of a decode step at 1, 8 and 32 rows (128 tokens in, 64 out), the same where 32 and 256 rows
sample, and prompt tokens/s; then decode steps by rows and context, each as a share of what this device could
do at best (measured in the same run).

`--host` prints what Python takes of a decode step on CUDA, in place of all that: µs and bytecode instructions
at 1, 32 and 256 rows. The engine is made as on CUDA, but its captured steps compute nothing, and no GPU is
needed. Instructions are the same on every machine.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import floors
from common.messages.plan import NewRow
from common.messages.request import SamplingParams
from common.settings.settings import Settings
from gpu_worker.engine.cuda.linear import fuse_linears
from gpu_worker.engine.engine import Engine
from gpu_worker.engine.model import load, passes
from tests.support.engine import on_cuda, tiny_models
from tests.support.engine.row_steps import plan, start_row

ROWS = (1, 8, 32)
SAMPLED_ROWS = (32, 256)
GRID_STEPS = 32
IN_TOKENS, OUT_TOKENS = 128, 64
PROMPT_TOKENS = (128, 512, 2048)
UNLIMITED_STEPS = 2**30
HOST_ROWS = (1, 32, 256)
HOST_STEPS, COUNTED_STEPS, WARM_STEPS = 128, 8, 4
SAMPLING = {
    "greedy": None,
    "temperature": SamplingParams(temperature=0.8),
    "temperature, top-p": SamplingParams(temperature=0.8, top_p=0.95),
    "temperature, top-p, penalties": SamplingParams(
        temperature=0.8, top_p=0.95, repetition_penalty=1.1, frequency_penalty=0.2, presence_penalty=0.2
    ),
}


def packed(values: Sequence[int]) -> bytes:
    return np.array(values, "<i4").tobytes()


class Benchmark:
    """Loads of an engine; prints a line for each."""

    def __init__(self, engine: Engine, ceilings: floors.Ceilings) -> None:
        self.engine = engine
        self.ceilings = ceilings
        self.geometry = engine.loaded.geometry
        self.random = np.random.default_rng(0)
        self.num_started = 0

    def start(
        self,
        num_rows: int,
        in_tokens: int,
        out_tokens: int,
        prefill_tokens: int,
        sampling: SamplingParams | None = None,
    ) -> None:
        starts = [self.row(index, in_tokens, out_tokens, sampling) for index in range(num_rows)]
        self.engine.apply(plan(UNLIMITED_STEPS, prefill_tokens, starts))
        self.num_started += num_rows

    def row(self, index: int, in_tokens: int, out_tokens: int, sampling: SamplingParams | None) -> NewRow:
        blocks = -(-(in_tokens + out_tokens) // self.engine.block_size)
        ids = self.random.integers(100, self.engine.loaded.vocab_size, in_tokens).tolist()
        own_blocks = range(1 + index * blocks, 1 + (index + 1) * blocks)
        seeded = sampling and replace(sampling, seed=index)
        number = self.num_started + index
        return start_row(number, ids, out_tokens, blocks=own_blocks, sampling=seeded, ignore_eos=True)

    def sampled(self, num_rows: int) -> None:
        """Decodes rows that sample, each way in turn; skipped if the cache has no room for so many rows."""
        if self.fits(num_rows, IN_TOKENS + OUT_TOKENS):
            for name in SAMPLING:
                self.decode(num_rows, name)

    def fits(self, num_rows: int, context: int) -> bool:
        blocks = num_rows * -(-(context + GRID_STEPS) // self.engine.block_size)
        return blocks <= self.engine.ready.num_blocks and context + GRID_STEPS <= self.engine.ready.context

    def decode(self, num_rows: int, name: str = "greedy") -> None:
        began = time.perf_counter()
        self.start(num_rows, IN_TOKENS, OUT_TOKENS, num_rows * IN_TOKENS, SAMPLING[name])
        steps = list(iter(self.engine.step, None))
        seconds = time.perf_counter() - began
        decoded = [step.duration_ms for step in steps if not step.prefilled]
        step_ms = statistics.median(decoded)
        print(
            f"{num_rows:3d} rows, {name}: step {step_ms:6.2f} ms, "
            f"decode {num_rows / step_ms * 1e3:6.0f} tokens/s, "
            f"with prefill {num_rows * OUT_TOKENS / seconds:6.0f} tokens/s",
            flush=True,
        )

    def host(self, num_rows: int) -> None:
        """Decodes rows by captured steps that compute nothing."""
        self.start(num_rows, 1, HOST_STEPS, num_rows)
        steps_us = []
        for _ in range(HOST_STEPS - COUNTED_STEPS - WARM_STEPS):
            began = time.perf_counter()
            self.engine.step()
            steps_us.append(1e6 * (time.perf_counter() - began))
        count = count_instructions(lambda: [self.engine.step() for _ in range(COUNTED_STEPS)])
        step_us = statistics.median(steps_us[WARM_STEPS:])
        print(f"{num_rows:3d} rows: {step_us:6.0f} µs, {count / COUNTED_STEPS:7.0f} instructions", flush=True)
        list(iter(self.engine.step, None))

    def prefill(self, tokens: int, prefill_tokens: int) -> None:
        self.start(1, tokens, 1, prefill_tokens)
        duration_ms = sum(step.duration_ms for step in iter(self.engine.step, None))
        share = self.floor_ms(min(tokens, prefill_tokens), 1, 0) * -(-tokens // prefill_tokens) / duration_ms
        load = f"prompt of {tokens} in steps of {min(tokens, prefill_tokens)}"
        print(f"{load}: {tokens / duration_ms * 1e3:6.0f} tokens/s, {share:.2f} of the floor", flush=True)

    def decode_at(self, num_rows: int, context: int) -> None:
        """Decodes rows that hold their context already: random values in place of a prefill."""
        self.start(num_rows, context, GRID_STEPS, num_rows)
        self.fill_cache(context - 1)
        list(iter(self.engine.step, None))  # one token of the prompts, then decoding
        self.start(num_rows, context, GRID_STEPS, num_rows)
        self.fill_cache(context - 1)
        steps = [step.duration_ms for step in iter(self.engine.step, None) if step.samples]
        step_ms, mean_context = statistics.median(steps[1:]), context + GRID_STEPS // 2
        read_bytes = num_rows * floors.kv_bytes(self.geometry, mean_context)
        floor_ms = self.floor_ms(num_rows, num_rows, read_bytes)
        print(
            f"{num_rows:3d} rows at {context:5d}: step {step_ms:6.2f} ms, "
            f"{floor_ms / step_ms:.2f} of the floor ({floor_ms:.2f} ms); "
            f"{num_rows / step_ms * 1e3:6.0f} tokens/s",
            flush=True,
        )

    def floor_ms(self, tokens: int, samples: int, read_bytes: int) -> float:
        """Returns the shortest possible duration of a step, as in floors.py."""
        weights = floors.weights_of(self.engine.loaded.model, tokens)
        return floors.floor_ms(self.ceilings, weights, tokens, samples, read_bytes)

    @torch.inference_mode()
    def fill_cache(self, kv_len: int) -> None:
        rows = list(self.engine.rows.rows.values())
        cache, end = self.engine.loaded.cache, 1 + sum(len(row.blocks) for row in rows)
        for pages in (*cache.keys, *cache.values):  # the same in all blocks: numbers for each take minutes
            pages[1:end] = torch.randn(pages.shape[1:], device=pages.device).to(pages.dtype)
        for row in rows:
            row.kv_len = kv_len


def print_host() -> None:
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        tiny_models.save(Path(folder), *tiny_models.FAMILIES["Llama"])
        patch.setattr(passes, "pack_linears", lambda model, blocks: fuse_linears(model))
        patch.setattr(load, "choose_backend", on_cuda.backend_of)
        sizes: dict[str, Any] = {"max_batch_size": max(HOST_ROWS), "kv_cache_bytes": 2**27, "block_size": 16}
        engine = Engine(Settings(model_id=folder, device="cpu", threads=1, **sizes))
        engine.runs_ahead = True
        engine.capture(captured, max(HOST_ROWS), False)
        benchmark = Benchmark(engine, floors.Ceilings(1.0, 1.0))
        for num_rows in HOST_ROWS:
            benchmark.host(num_rows)


def captured(run: Callable[[], None]) -> Callable[[], None]:
    """A step whose replay costs nothing: on a GPU the host goes on at once."""
    run()
    return lambda: None


def count_instructions(run: Callable[[], object]) -> int:
    """The bytecode instructions of a call."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    sys.settrace(trace)
    run()
    sys.settrace(None)
    return count


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--rows", type=numbers, default=[1, 8, 32, 256], help="rows of the steps by rows and context"
    )
    parser.add_argument("--contexts", type=numbers, default=[128, 2048])
    parser.add_argument("--host", action="store_true")
    flags, others = parser.parse_known_args()
    if flags.host:
        print_host()
        return
    settings = Settings.read(others)
    ceilings = floors.measure(settings)
    began = time.perf_counter()
    engine = Engine(settings)
    ready = engine.ready
    print(f"{ready.model} {ready.dtype} on {ready.device}: ready after {time.perf_counter() - began:.1f} s")
    print(
        f"max_batch_prefill_tokens {ready.max_batch_prefill_tokens}, "
        f"{ready.num_blocks} blocks of {ready.block_size} tokens"
    )
    print(
        f"reads {ceilings.bytes_per_s / 1e9:.0f} GB/s, products {ceilings.flops_per_s / 1e12:.2f} TFLOP/s, ",
        end="",
    )
    weights = floors.weights_of(engine.loaded.model, 1)
    print(f"weights of a step {weights.num_bytes / 1e9:.2f} GB", flush=True)
    benchmark = Benchmark(engine, ceilings)
    benchmark.decode(8)  # warms up
    for num_rows in ROWS:
        benchmark.decode(num_rows)
    for num_rows in SAMPLED_ROWS:
        if num_rows <= settings.max_batch_size:
            benchmark.sampled(num_rows)
    for tokens in PROMPT_TOKENS:
        benchmark.prefill(tokens, ready.max_batch_prefill_tokens)
    for context in flags.contexts:
        for num_rows in flags.rows:
            if num_rows <= settings.max_batch_size and benchmark.fits(num_rows, context):
                benchmark.decode_at(num_rows, context)


if __name__ == "__main__":
    main()
