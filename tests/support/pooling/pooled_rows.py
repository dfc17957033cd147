"""Rows that pool, played for an engine in this process."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from common.messages.request import PoolingParams
from tests.support.engine.batch_player import Player

PLAIN = PoolingParams()


def pool_rows(
    engine: Any,
    prompts: Mapping[int, Sequence[int]],
    params: Mapping[int, PoolingParams] | None = None,
    prefill_tokens: int = 1000,
) -> dict[int, torch.Tensor]:
    """What each prompt is pooled to: float32 [vectors, size]."""
    free = list(range(1, engine.ready.num_blocks + 1))
    player = Player(engine, free, prefill_tokens, until=engine.rows.step)
    starts = []
    for row, ids in prompts.items():
        pooling = (params or {}).get(row, PLAIN)
        logits = pooling.logits(engine.ready.vocab_size)
        starts.append(player.start(row, ids, 1, logits=logits, pooling=pooling))
    assert player.run(starts) == {row: [] for row in prompts}, "no tokens"
    assert player.ended == dict.fromkeys(prompts, ("length", 0)), player.ended
    return {row: values_of(player.logits[row]) for row in prompts}


def values_of(pieces: Mapping[int, bytes]) -> torch.Tensor:
    """float32 [positions, size] of pieces by their first position; each has one position at least"""
    values = [torch.frombuffer(bytearray(pieces[first]), dtype=torch.float32) for first in sorted(pieces)]
    return torch.cat(values)
