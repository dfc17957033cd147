"""The bare engine in this process, with all cores: `python -m benchmarks.engine [flags of the settings]`.

Prints tokens/s and milliseconds of a decode step at 1, 8 and 32 rows (128 tokens in, 64 out), the same where all rows sample, and prompt
tokens/s.
"""

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from common.messages import Sampling
from common.settings import Settings
from gpu_worker.door import Grant, StartRow
from gpu_worker.engine.engine import Engine

ROWS = (1, 8, 32)
IN_TOKENS, OUT_TOKENS = 128, 64
PROMPT_TOKENS = (128, 512, 2048)
EVER = 2**30
SAMPLING = {
    "greedy": None,
    "temperature": Sampling(temperature=0.8),
    "temperature, top-p": Sampling(temperature=0.8, top_p=0.95),
    "temperature, top-p, penalties": Sampling(
        temperature=0.8, top_p=0.95, repetition_penalty=1.1, frequency_penalty=0.2, presence_penalty=0.2
    ),
}


def packed(values: Sequence[int]) -> bytes:
    return np.array(values, "<i4").tobytes()


class Bench:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.random = np.random.default_rng(0)
        self.num_started = 0

    def start(self, num_rows: int, in_tokens: int, out_tokens: int, prefill_tokens: int, sampling: Sampling | None = None) -> None:
        starts = [self.row(index, in_tokens, out_tokens, sampling) for index in range(num_rows)]
        self.engine.apply(Grant(EVER, prefill_tokens, starts))
        self.num_started += num_rows

    def row(self, index: int, in_tokens: int, out_tokens: int, sampling: Sampling | None) -> StartRow:
        blocks = -(-(in_tokens + out_tokens) // self.engine.block_size)
        ids = self.random.integers(100, self.engine.loaded.vocab_size, in_tokens).tolist()
        owned = range(1 + index * blocks, 1 + (index + 1) * blocks)
        seeded = sampling and replace(sampling, seed=index)
        return StartRow(self.num_started + index, packed(ids), 0, out_tokens, True, packed(owned), sampling=seeded)

    def decode(self, num_rows: int, name: str = "greedy") -> None:
        began = time.perf_counter()
        self.start(num_rows, IN_TOKENS, OUT_TOKENS, num_rows * IN_TOKENS, SAMPLING[name])
        steps = list(iter(self.engine.step, None))
        seconds = time.perf_counter() - began
        decoded = [step.duration_ms for step in steps if not step.prefilled]
        step_ms = statistics.median(decoded)
        print(
            f"{num_rows:3d} rows, {name}: step {step_ms:6.1f} ms, decode {num_rows / step_ms * 1e3:6.0f} tokens/s, "
            f"with prefill {num_rows * OUT_TOKENS / seconds:6.0f} tokens/s",
            flush=True,
        )

    def prefill(self, tokens: int, prefill_tokens: int) -> None:
        self.start(1, tokens, 1, prefill_tokens)
        duration_ms = sum(step.duration_ms for step in iter(self.engine.step, None))
        print(f"prompt of {tokens} in steps of {min(tokens, prefill_tokens)}: {tokens / duration_ms * 1e3:6.0f} tokens/s", flush=True)


def main() -> None:
    began = time.perf_counter()
    engine = Engine(Settings.read(sys.argv[1:]))
    ready = engine.ready
    print(f"{ready.model} {ready.dtype}: ready after {time.perf_counter() - began:.1f} s")
    print(f"max_batch_prefill_tokens {ready.max_batch_prefill_tokens}", flush=True)
    bench = Bench(engine)
    bench.decode(8)  # warms up
    for num_rows in ROWS:
        bench.decode(num_rows)
    for name in SAMPLING:
        bench.decode(max(ROWS), name)
    for tokens in PROMPT_TOKENS:
        bench.prefill(tokens, ready.max_batch_prefill_tokens)


if __name__ == "__main__":
    main()
