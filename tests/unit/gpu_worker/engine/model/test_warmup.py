"""Warm-up: what is compiled when it is first used is used before rows come."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_worker.engine.attention.kv_cache import KVCache
from gpu_worker.engine.batch.row_slice import RowSlice
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


def test_the_scratch_block_is_filled_as_the_cache_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another kernel, which the first grant would wait for."""
    filled = list[tuple[list[int], float]]()
    monkeypatch.setattr(KVCache, "fill", lambda self, blocks, value: filled.append((blocks, value)))
    tiny_models.save(tmp_path, *tiny_models.FAMILIES["Llama"])
    engine_of(tmp_path)
    assert filled and filled[-1] == ([0], 0.0)
