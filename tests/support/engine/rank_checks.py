"""What an engine of several ranks generates, compared with transformers."""

from pathlib import Path
from typing import Any

import torch

from gpu_worker.engine.parallel.communicator import Communicator
from tests.support.engine import tiny_models
from tests.support.engine.batch_player import Player
from tests.support.engine.multi_rank_engine import Led

NEW_TOKENS = 24
LENGTHS = (1, 20, 70)
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "kv_cache_bytes": 2**23,
    "max_batch_prefill_tokens": 64,
    "block_size": 8,
    "debug_kv": True,
}


def prompts(vocab_size: int) -> list[list[int]]:
    torch.manual_seed(1)
    return [torch.randint(3, vocab_size, (length,)).tolist() for length in LENGTHS]


def player(engine: Any, prefill_tokens: int = 1000) -> Player:
    free = list(range(1, engine.ready.num_blocks + 1))
    return Player(engine, free, prefill_tokens, until=engine.rows.step)


def play(
    engine: Any, rows: dict[int, list[int]], prefill_tokens: int = 1000, base: int = 0, **options: Any
) -> dict[int, list[int]]:
    """All ids of rows that start with `base` tokens generated, beyond them."""
    played = player(engine, prefill_tokens)
    options |= {"ignore_eos": True}
    return played.run([played.start(row, ids, NEW_TOKENS, base, **options) for row, ids in rows.items()])


def play_behind(engine: Any, fresh: dict[int, list[int]]) -> dict[int, list[int]]:
    """All ids of rows behind nine tokens, in blocks that others have filled with prompts and tokens."""
    played = player(engine)
    played.kept = set(played.free)
    played.run([played.start(row, ids, 9, ignore_eos=True) for row, ids in fresh.items()])
    ids = played.run(played.start_resumed(list(fresh), NEW_TOKENS, base=9, by=100))
    return {row: ids[100 + row] for row in fresh}


def check_ids(ranks: Communicator, family: tuple[str, dict[str, Any]], folder: Path) -> None:
    """The ids of a tiny model of the family are those of transformers' `generate`: alone, batched, chunked,
    resumed, and in blocks that others have filled.
    """
    model = tiny_models.save(folder, *family)
    fresh = dict(enumerate(prompts(model.config.get_text_config().vocab_size)))
    expected = {row: tiny_models.generate(model, prompt, NEW_TOKENS) for row, prompt in fresh.items()}
    with Led(ranks, model_id=str(folder), threads=1, **SETTINGS) as engine:
        assert engine.ready.world_size == ranks.world_size
        assert play(engine, {1: fresh[1]})[1] == expected[1], "alone"
        assert play(engine, fresh) == expected, "batched"
        assert play(engine, fresh, prefill_tokens=7) == expected, "chunked"
        resumed = play(engine, {row: prompt + expected[row][:9] for row, prompt in fresh.items()}, base=9)
        assert resumed == {row: ids[9:] for row, ids in expected.items()}, "resumed"
        if engine.ready.prefix_caching:
            assert play_behind(engine, fresh) == resumed, "behind blocks of others"
