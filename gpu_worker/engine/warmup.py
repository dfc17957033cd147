"""How long prompt tokens take, and how many of them one step may take."""

import time
from collections.abc import Callable, Sequence

import numpy as np

from gpu_worker.engine.rows import Part, Row

STEP_MS = 150.0
TIMED_TOKENS = 128
TIMES = 3
MULTIPLE = 32

Forward = Callable[[Sequence[Part]], object]


def token_ms(forward: Forward, context: int, vocab_size: int, block_size: int) -> float:
    """Of one prompt token, in a step of 128."""
    timed = min(TIMED_TOKENS, context)
    return measure_ms(forward, prompt(timed, vocab_size, block_size)) / timed


def max_batch_prefill_tokens(token_ms: float, context: int) -> int:
    """Prompt tokens of a step of 150 ms; a multiple of 32."""
    tokens = int(STEP_MS / token_ms)
    return max(MULTIPLE, min(tokens, context) // MULTIPLE * MULTIPLE)


def measure_ms(forward: Forward, parts: Sequence[Part]) -> float:
    """The best of several: what other processes do meanwhile must not lower the budget for this engine's whole life."""
    times = []
    for _ in range(TIMES):
        began = time.perf_counter()
        forward(parts)
        times.append(time.perf_counter() - began)
    return min(times) * 1e3


def prompt(length: int, vocab_size: int, block_size: int) -> list[Part]:
    """The prefill of a row that owns nothing but the scratch block."""
    ids = np.arange(length, dtype=np.int32) % vocab_size
    blocks = np.zeros(-(-length // block_size), np.int32)
    return [Part(Row(0, ids, 0, 1, blocks), 0, length, samples=True)]
