"""Warm-up: what is compiled when it is first used is used before rows come."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_worker.engine.attention.kv_cache import KVCache
from gpu_worker.engine.batch.row import RowSlice
from gpu_worker.engine.model import warmup
from tests.support.engine import tiny_models
from tests.support.engine.tiny_engine import engine_of

VOCAB = 10


def test_rows_are_sampled_with_parameters_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA these are two kernels."""
    sampled = list[tuple[tuple[int, ...], set[bool]]]()

    def sample(logits: torch.Tensor, requests: Sequence[Any]) -> None:
        sampled.append((tuple(logits.shape), {request is None for request in requests}))

    def forward(slices: Sequence[RowSlice]) -> torch.Tensor:
        return torch.zeros(len(slices), VOCAB)

    monkeypatch.setattr(warmup, "sample", sample)
    warmup.run_largest_step(forward, 40, 3, 16, VOCAB, 16)
    assert sampled == [((3, VOCAB), {False}), ((3, VOCAB), {True})]


@pytest.mark.parametrize(
    ("took_s", "cpu_s", "delay_s", "expected_s"),
    [
        pytest.param(1.0, 1.6, 0.0, 1.0, id="undisturbed, one thread has less to do"),
        pytest.param(3.0, 1.6, 2.0, 1.0, id="one of two threads waited"),
        pytest.param(3.0, 2.0, 4.0, 1.0, id="both waited at once"),
        pytest.param(1.0, 2.2, 0.0, 1.0, id="other threads computed, too"),
    ],
)
def test_a_step_is_timed_without_what_other_processes_took(
    took_s: float, cpu_s: float, delay_s: float, expected_s: float
) -> None:
    assert warmup.undisturbed_s(took_s, cpu_s, delay_s, num_threads=2) == expected_s


def test_the_budget_of_an_engine_that_starts_on_a_busy_machine_is_that_of_a_quiet_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its clocks go as those of a process that has a core for a tenth of the time."""
    clocks = {"took": 0.0, "delay": 0.0, "cpu": 0.0}

    def forward(slices: Sequence[RowSlice]) -> None:
        clocks["took"] += 1.28
        clocks["delay"] += 1.28 - 0.128
        clocks["cpu"] += 0.128

    monkeypatch.setattr(time, "perf_counter", lambda: clocks["took"])
    monkeypatch.setattr(time, "process_time", lambda: clocks["cpu"])
    monkeypatch.setattr(warmup, "run_delay_s", lambda pid: clocks["delay"])
    token_ms = warmup.token_ms(forward, 1024, VOCAB, 16, torch.device("cpu"))  # type: ignore[arg-type]
    assert token_ms == pytest.approx(1.0)
    assert warmup.max_batch_prefill_tokens(token_ms, torch.device("cpu")) == 1184
    assert warmup.max_batch_prefill_tokens(token_ms / 100, torch.device("cpu")) == 2048
    assert warmup.max_batch_prefill_tokens(token_ms, torch.device("cuda")) == 128


def test_the_scratch_block_is_filled_as_the_cache_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another kernel, which the first grant would wait for."""
    filled = list[tuple[list[int], float]]()
    monkeypatch.setattr(KVCache, "fill", lambda self, blocks, value: filled.append((blocks, value)))
    tiny_models.save(tmp_path, *tiny_models.FAMILIES["Llama"])
    engine_of(tmp_path)
    assert filled and filled[-1] == ([0], 0.0)
