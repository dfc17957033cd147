"""Warm-up: measures how long prompt tokens take, and so how many one step may have; runs the largest steps,
to measure their memory and to compile kernels before rows wait for them.
"""

import os
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from common.messages.plan import NewRow
from common.messages.request import Generate, SamplingParams, StoppingParams
from common.process.machine import run_delay_s
from common.settings.settings import Settings
from gpu_worker.engine.batch.adapters import Adapter
from gpu_worker.engine.batch.row import Row, RowSlice
from gpu_worker.engine.batch.sampling_state import SampleRequest, SamplingState
from gpu_worker.engine.batch.split_step import Forward
from gpu_worker.engine.cuda.graphs import FIXED_TOKENS, Capture, CudaGraphs, graph_sizes
from gpu_worker.engine.drafting.proposers import MAX_FORCED
from gpu_worker.engine.model.kv_budget import measure_peak
from gpu_worker.engine.model.model import LoadedModel
from gpu_worker.engine.sampling.sampler import sample

TARGET_STEP_MS = {"cpu": 4000.0, "cuda": 150.0}
"""How long the largest step may take. On CPU a burst of short prompts takes about that long; in parts, the
rows of each would pause for the next.
"""
NUM_MEASURED = 3
TOKENS_MULTIPLE = 32
TIMED_TOKENS = {"cpu": 128, "cuda": 2048}
MAX_TOKENS = {"cpu": 2048, "cuda": 8192}
"""Prompt tokens of the largest step, unless set otherwise: products of as many rows are bound by
arithmetic.
"""

PROPOSING_TOKENS = 256
"""Tokens up to which a step has room for all proposals of all rows: their logits take memory. As far as
reading weights from memory takes the time, such a step takes hardly longer than one of a single token.
"""
CAPTURED_PROMPT_TOKENS = 256
"""Tokens of prompts for which a captured step has room beside rows that decode."""


def max_prompt_tokens(setting: int | None, device: torch.device) -> int:
    """Prompt tokens that a step may ever have."""
    return setting or MAX_TOKENS[device.type]


def max_decoded_tokens(max_batch_size: int) -> int:
    """Tokens of rows that decode, and their proposals, that a step may ever have."""
    return max(max_batch_size, min((1 + MAX_FORCED) * max_batch_size, PROPOSING_TOKENS))


def max_captured_tokens(max_batch_size: int) -> int:
    """Tokens that a captured step may ever have."""
    return max_decoded_tokens(max_batch_size) + CAPTURED_PROMPT_TOKENS


def max_step_tokens(settings: Settings, device: torch.device) -> int:
    """Tokens that a step may ever have, the largest captured one included."""
    prompt_tokens = max_prompt_tokens(settings.max_batch_prefill_tokens, device)
    return max(prompt_tokens, CAPTURED_PROMPT_TOKENS) + max_decoded_tokens(settings.max_batch_size)


def token_ms(forward: Forward, context: int, vocab_size: int, block_size: int, device: torch.device) -> float:
    """ms of one prompt token, in a step of many."""
    timed = min(TIMED_TOKENS[device.type], context)
    parts = prompt_parts(timed, context, vocab_size, block_size)
    return fastest_ms(lambda: forward(parts), device) / timed


def max_batch_prefill_tokens(token_ms: float, device: torch.device) -> int:
    """Prompt tokens of a step of TARGET_STEP_MS; a multiple of 32."""
    tokens = min(int(TARGET_STEP_MS[device.type] / token_ms), MAX_TOKENS[device.type])
    return max(TOKENS_MULTIPLE, tokens // TOKENS_MULTIPLE * TOKENS_MULTIPLE)


def fastest_ms(run: Callable[[], object], device: torch.device) -> float:
    """The ms of the fastest of several runs. On CPU the time in which other processes had the cores is left
    out, since it would lower the budget for the engine's whole life: threads that waited for cores may have
    waited at the same time, but each has computed its part.
    """
    times = []
    for _ in range(NUM_MEASURED):
        delay_s, cpu_s, began_s = run_delay_s(os.getpid()), time.process_time(), time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        took_s, cpu_s = time.perf_counter() - began_s, time.process_time() - cpu_s
        delay_s = run_delay_s(os.getpid()) - delay_s
        undisturbed_s = min(took_s, max(took_s - delay_s, cpu_s / torch.get_num_threads()))
        times.append(undisturbed_s if device.type == "cpu" else took_s)
    return min(times) * 1e3


def run_largest_step(
    forward: Forward, tokens: int, rows: int, context: int, vocab_size: int, block_size: int
) -> None:
    """Compute `tokens` prompt tokens, and sample `rows` rows twice: with the parameters that need most
    memory, and without any. Kernels are compiled at their first use, for which no row should wait.
    """
    logits = forward(prompt_parts(tokens, context, vocab_size, block_size))
    sampling = SamplingParams(temperature=1.0, typical_p=0.9)
    state = SamplingState.of(
        NewRow(0, 1, 0, b"", b"", Generate("", "", b"", StoppingParams(1), sampling)), []
    )
    assert state
    for request in (SampleRequest(state, 0), None):
        sample(logits.new_zeros(rows, logits.shape[1]), [request] * rows)


def capture_steps(loaded: LoadedModel, capture: Capture, max_rows: int, deterministic: bool) -> CudaGraphs:
    """Capture steps of few tokens; with `deterministic` one of a fixed shape. Where the cache has no blocks
    yet, rows have as many as their context needs.
    """
    tokens = (max_captured_tokens if loaded.computes_tokens_alone else max_decoded_tokens)(max_rows)
    tokens = FIXED_TOKENS if deterministic else tokens
    max_blocks = min(loaded.max_row_blocks, loaded.cache.num_blocks or loaded.max_row_blocks)
    samples = max(tokens, max_decoded_tokens(max_rows))
    graphs = CudaGraphs(loaded, tokens, max_blocks, samples, is_fixed=deterministic)
    longest = 1 if deterministic else max_blocks * loaded.geometry.block_size
    graphs.capture(capture, [tokens] if deterministic else graph_sizes(max_rows, tokens), longest)
    return graphs


def run_all_shapes(forward: Forward, vocab_size: int, block_size: int, has_adapters: bool = False) -> None:
    """Run one token, and several, and the same as steps with LoRA adapters if there are any: compilers make
    code for one, and for any number.
    """
    for adapter in (None, Adapter("")) if has_adapters else (None,):
        for tokens in (1, 2, 3, 16):
            parts = prompt_parts(tokens, tokens, vocab_size, block_size)
            for part in parts:
                part.row.adapter = adapter
            forward(parts)


def prompt_parts(tokens: int, context: int, vocab_size: int, block_size: int) -> list[RowSlice]:
    """The prefills of rows that own nothing but the scratch block, none longer than the context."""
    lengths = [min(context, tokens - begin) for begin in range(0, tokens, context)]
    return [prompt_part(length, vocab_size, block_size) for length in lengths]


def single_tokens(num_rows: int, vocab_size: int, block_size: int) -> list[RowSlice]:
    """One token, and its logits, of so many rows."""
    return [prompt_part(1, vocab_size, block_size) for _ in range(num_rows)]


def prompt_part(length: int, vocab_size: int, block_size: int) -> RowSlice:
    ids = np.arange(length, dtype=np.int32) % vocab_size
    blocks = np.zeros(-(-length // block_size), np.int32)
    return RowSlice(Row(0, ids, 0, 1, blocks), 0, length, samples=True)


def peak_bytes(loaded: LoadedModel, settings: Settings) -> int:
    """What the largest step allocates on CUDA, and what captured steps keep. The pool of graphs is memory of
    its own: no other step uses it, so both count.
    """
    block_size = loaded.geometry.block_size
    shape = (loaded.context, loaded.vocab_size, block_size)
    tokens = max_prompt_tokens(settings.max_batch_prefill_tokens, loaded.device)
    rows = max_decoded_tokens(settings.max_batch_size)

    largest_bytes = measure_peak(
        loaded.device, lambda: run_largest_step(loaded.compute, tokens, rows, *shape)
    )
    if (tower := loaded.tower) and tower.model:
        largest_bytes = max(largest_bytes, measure_peak(loaded.device, tower.try_out()))
    own_bytes = largest_bytes + captured_bytes(loaded, settings)
    if loaded.draft is None:
        return own_bytes
    draft_bytes = peak_bytes(loaded.draft.cached, settings) if loaded.draft.cached else 0
    return own_bytes + draft_bytes + loaded.draft.max_states * loaded.draft.state_bytes


def captured_bytes(loaded: LoadedModel, settings: Settings) -> int:
    """What captured steps keep: inputs, logits and plans of all sizes, and the memory in which the largest
    one computes, which the graphs' pool will hold. The steps are run, not captured.
    """
    if settings.enforce_eager or not loaded.capturable:
        return 0

    def run_once(run: Callable[[], None]) -> Callable[[], None]:
        run()
        return run

    sizes = settings.max_batch_size, settings.deterministic
    return measure_peak(loaded.device, partial(capture_steps, loaded, run_once, *sizes))
