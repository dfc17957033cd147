"""Engines of tiny random models, prompts of several lengths, and all ways to play them."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from common.settings.settings import Settings
from gpu_worker.engine.engine import Engine
from gpu_worker.engine.parallel.communicator import SINGLE_RANK, Communicator
from tests.support.engine.batch_player import Player, player
from tests.support.engine.tiny_models import VOCAB, generate

NEW_TOKENS, MANY_NEW_TOKENS = 16, 40
"""The many are for the slow tests."""

LENGTHS = (1, 20, 50, 70)
"""Of the prompts: some are longer than the windows and the original rope lengths."""


Rows = Mapping[int, Sequence[int]]
"""Ids by the numbers of rows."""
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


def prompts(vocab_size: int = VOCAB) -> list[list[int]]:
    torch.manual_seed(1)
    return [torch.randint(3, vocab_size, (length,)).tolist() for length in LENGTHS]


def answers(model: Any, rows: Rows | None = None, new_tokens: int = NEW_TOKENS) -> dict[int, list[int]]:
    """The ids of transformers' `generate` for rows, by default those of `prompts`."""
    rows = rows or dict(enumerate(prompts()))
    return {row: generate(model, [*ids], new_tokens) for row, ids in rows.items()}


# --- ways to play rows --------------------------------------------------------------------------------------


def play_rows(
    engine: Any,
    rows: Rows,
    prefill_tokens: int = 1000,
    new_tokens: int = NEW_TOKENS,
    shown: Rows | None = None,
    num_blocks: int = 0,
    lead: int = 4,
    horizon: int = 4,
    served: int = 1000,
    params: Mapping[int, Mapping[str, Any]] | None = None,
    **common: Any,
) -> Player:
    """Play rows with these prompts to their end, behind the tokens that were `shown` of them. `params` of
    each, and those in `common`, are as in `start_row`; the others as in Player.
    """
    played, shown, params = player(engine, prefill_tokens, num_blocks), shown or {}, params or {}
    starts = []
    for row, ids in rows.items():
        before, own = shown.get(row, []), {"ignore_eos": True} | common | {**params.get(row, {})}
        starts.append(played.start(row, [*ids, *before], new_tokens, len(before), **own))
    played.run(starts, horizon, lead, served)
    return played


def play(engine: Any, rows: Rows, prefill_tokens: int = 1000, **how: Any) -> dict[int, list[int]]:
    """Return the new ids of rows, as `play_rows` plays them."""
    return play_rows(engine, rows, prefill_tokens, **how).ids


def check_ids(engine: Any, expected: Rows, fresh: Rows | None = None, **how: Any) -> None:
    """Rows with the prompts, by default those of `prompts`, have the expected ids, however they are batched,
    chunked and resumed.
    """
    fresh, [new_tokens] = fresh or dict(enumerate(prompts())), {len(ids) for ids in expected.values()}
    ids_of: Any = partial(play, engine, new_tokens=new_tokens, **how)
    for row, prompt in [*fresh.items()][: len(LENGTHS)]:
        assert ids_of({row: prompt})[row] == expected[row], "alone"
    assert ids_of(fresh) == expected, "batched"
    assert ids_of(fresh, prefill_tokens=7) == expected, "chunked"
    shown = {row: ids[: new_tokens // 2 + 1] for row, ids in expected.items()}
    resumed = ids_of(fresh, shown=shown)
    assert {row: [*shown[row], *ids] for row, ids in resumed.items()} == expected, "resumed"


BATCHED: dict[str, int] = {}
CHUNKED = {"prefill_tokens": 7, "lead": 1, "horizon": 2}
SCARCE = {"num_blocks": 24, "lead": 1, "served": 1}
"""A row runs into the end of its blocks with each grant."""


def check_ways(play: Callable[..., Player], expected: Player, *ways: Mapping[str, int]) -> None:
    """Rows are told the same in these ways, and resumed."""
    for way in ways:
        assert play(**way).answer == expected.answer, way
    shown = {row: ids[: min(5 + 4 * row, len(ids) - 1)] for row, ids in expected.ids.items()}
    resumed = play(shown=shown)
    assert {row: shown[row] + ids for row, ids in resumed.ids.items()} == expected.ids, "resumed"
    tops = {(row, at): top for (row, at), top in expected.top_logprobs.items() if at >= len(shown[row])}
    assert resumed.top_logprobs == tops
