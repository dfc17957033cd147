"""Engines of tiny random models, and what they generate for prompts of several lengths."""

from functools import partial
from pathlib import Path
from typing import Any

import torch

from common.settings.settings import Settings
from gpu_worker.engine.engine import Engine
from gpu_worker.engine.parallel.communicator import SINGLE_RANK, Communicator
from tests.support.engine.batch_player import player
from tests.support.engine.tiny_models import VOCAB

NEW_TOKENS, MANY_NEW_TOKENS = 16, 40
"""The many are for the slow tests."""

LENGTHS = (1, 20, 50, 70)
"""Of the prompts: some are longer than the windows and the original rope lengths."""


SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "kv_cache_bytes": 2**23,
    "max_batch_prefill_tokens": 64,
    "block_size": 8,
    "debug_kv": True,
    "threads": 1,
}


def engine_of(folder: Path, communicator: Communicator = SINGLE_RANK, **settings: Any) -> Engine:
    return Engine(Settings(model_id=str(folder), **SETTINGS | settings), communicator=communicator)


def prompts() -> list[list[int]]:
    torch.manual_seed(1)
    return [torch.randint(3, VOCAB, (length,)).tolist() for length in LENGTHS]


def play(
    engine: Engine,
    prefixes: dict[int, list[int]],
    prefill_tokens: int = 1000,
    base: int = 0,
    new_tokens: int = NEW_TOKENS,
) -> dict[int, list[int]]:
    """Return the new ids of rows that start with `base` tokens generated before."""
    played = player(engine, prefill_tokens)
    return played.run(
        [played.start(row, ids, new_tokens, base, ignore_eos=True) for row, ids in prefixes.items()]
    )


def check_ids(
    engine: Engine, expected: dict[int, list[int]], fresh: dict[int, list[int]] | None = None
) -> None:
    """Rows with the prompts, by default those of `prompts`, have the expected ids, however they are batched,
    chunked and resumed.
    """
    fresh, [new_tokens] = fresh or dict(enumerate(prompts())), {len(ids) for ids in expected.values()}
    ids_of = partial(play, engine, new_tokens=new_tokens)
    assert {row: ids_of({row: prompt})[row] for row, prompt in fresh.items()} == expected, "alone"
    assert ids_of(fresh) == expected, "batched"
    assert ids_of(fresh, prefill_tokens=7) == expected, "chunked"
    resumed = ids_of({row: prompt + expected[row][:9] for row, prompt in fresh.items()}, base=9)
    assert resumed == {row: ids[9:] for row, ids in expected.items()}, "resumed"
