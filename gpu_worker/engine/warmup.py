"""How many prompt tokens one step may take."""

import time
from collections.abc import Callable, Sequence

import numpy as np

from gpu_worker.engine.rows import Part, Row

STEP_MS = 150.0
SIZES = (32, 128)  # tokens of the steps that are timed
MULTIPLE = 32

Forward = Callable[[Sequence[Part]], object]


def max_batch_prefill_tokens(forward: Forward, context: int, vocab_size: int, block_size: int) -> int:
    """Prompt tokens of a step of 150 ms, from a line through two timed sizes; a multiple of 32."""
    sizes = [min(size, context) for size in SIZES]
    small_ms, large_ms = (measure_ms(forward, prompt(size, vocab_size, block_size)) for size in sizes)
    token_ms = max(large_ms - small_ms, 1e-3) / max(1, sizes[1] - sizes[0])
    tokens = sizes[0] + int((STEP_MS - small_ms) / token_ms)
    return max(MULTIPLE, min(tokens, context) // MULTIPLE * MULTIPLE)


def measure_ms(forward: Forward, parts: Sequence[Part]) -> float:
    """The better of two: what other processes do meanwhile must not lower the budget for this engine's whole life."""
    times = []
    for _ in range(2):
        began = time.perf_counter()
        forward(parts)
        times.append(time.perf_counter() - began)
    return min(times) * 1e3


def prompt(length: int, vocab_size: int, block_size: int) -> list[Part]:
    """The prefill of a row that owns nothing but the scratch block."""
    ids = np.arange(length, dtype=np.int32) % vocab_size
    blocks = np.zeros(-(-length // block_size), np.int32)
    return [Part(Row(0, ids, 0, 1, True, blocks), 0, length, samples=True)]
