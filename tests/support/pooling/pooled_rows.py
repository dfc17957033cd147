"""Rows that pool, played for an engine in this process."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from common.messages.request import PoolingParams
from tests.support.engine.tiny_engine import play_rows

PLAIN = PoolingParams()


def pool_rows(
    engine: Any,
    prompts: Mapping[int, Sequence[int]],
    params: Mapping[int, PoolingParams] | None = None,
    prefill_tokens: int = 1000,
) -> dict[int, torch.Tensor]:
    """What each prompt is pooled to: float32 [vectors, size]."""
    ways = {row: (params or {}).get(row, PLAIN) for row in prompts}
    asked = {
        row: {"pooling": how, "logits": how.logits(engine.ready.vocab_size)} for row, how in ways.items()
    }
    played = play_rows(engine, prompts, prefill_tokens, 1, params=asked)
    assert not any(played.ids.values()), "no tokens"
    assert played.ended == dict.fromkeys(prompts, ("length", 0)), played.ended
    return {row: values_of(played.logits[row]) for row in prompts}


def values_of(pieces: Mapping[int, bytes]) -> torch.Tensor:
    """float32 [positions, size] of pieces by their first position; each has one position at least"""
    values = [torch.frombuffer(bytearray(pieces[first]), dtype=torch.float32) for first in sorted(pieces)]
    return torch.cat(values)
