"""The bare engine in this process, with all cores: `python -m benchmarks.engine [flags of the settings]`.

Prints tokens/s and milliseconds of a decode step at 1, 8 and 32 rows (128 tokens in, 64 out), and prompt tokens/s.
"""

import statistics
import sys
import time
from collections.abc import Sequence

import numpy as np

from common.settings import Settings
from gpu_worker.door import Grant, StartRow
from gpu_worker.engine.engine import Engine

ROWS = (1, 8, 32)
IN_TOKENS, OUT_TOKENS = 128, 64
PROMPT_TOKENS = (128, 512, 2048)
EVER = 2**30


def packed(values: Sequence[int]) -> bytes:
    return np.array(values, "<i4").tobytes()


class Bench:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.random = np.random.default_rng(0)
        self.num_started = 0

    def start(self, num_rows: int, in_tokens: int, out_tokens: int, prefill_tokens: int) -> None:
        self.engine.apply(Grant(EVER, prefill_tokens, [self.row(index, in_tokens, out_tokens) for index in range(num_rows)]))
        self.num_started += num_rows

    def row(self, index: int, in_tokens: int, out_tokens: int) -> StartRow:
        blocks = -(-(in_tokens + out_tokens) // self.engine.block_size)
        ids = self.random.integers(100, self.engine.loaded.vocab_size, in_tokens).tolist()
        owned = range(1 + index * blocks, 1 + (index + 1) * blocks)
        return StartRow(self.num_started + index, packed(ids), 0, out_tokens, True, packed(owned))

    def decode(self, num_rows: int) -> None:
        began = time.perf_counter()
        self.start(num_rows, IN_TOKENS, OUT_TOKENS, num_rows * IN_TOKENS)
        steps = list(iter(self.engine.step, None))
        seconds = time.perf_counter() - began
        decoded = [step.duration_ms for step in steps if not step.prefilled]
        step_ms = statistics.median(decoded)
        print(
            f"{num_rows:3d} rows: step {step_ms:6.1f} ms, decode {num_rows / step_ms * 1e3:6.0f} tokens/s, "
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
    for tokens in PROMPT_TOKENS:
        bench.prefill(tokens, ready.max_batch_prefill_tokens)


if __name__ == "__main__":
    main()
