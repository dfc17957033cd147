"""Rows with adapters sample, search, propose, sleep and return what rows of the merged model do."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from common.messages.request import BeamParams, SamplingParams
from common.settings.settings import Settings
from gpu_worker.engine.engine import Engine
from tests.support.adapters.playing import load_adapters
from tests.support.adapters.tiny_adapters import merged, save_adapter
from tests.support.engine import tiny_models
from tests.support.engine.batch_player import Player

PROMPTS: Sequence[list[int]] = ([5, 6, 7, 8] * 6, list(range(40, 70)))
COUNT = 12
FEATURES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"sampling": SamplingParams(temperature=0.9, top_p=0.9, seed=3)},
    "scored prompt": {"prompt_logprobs": 2},
    "beams": {"beams": BeamParams(3)},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Folders of a model, an adapter, and of both merged."""
    model, adapter, both = (tmp_path_factory.mktemp(name) for name in ("model", "adapter", "both"))
    base = tiny_models.save(model, *tiny_models.FAMILIES["Llama"])
    save_adapter(base, adapter, 1)
    tiny_models.save(both, *tiny_models.FAMILIES["Llama"])
    merged(base, adapter).save_pretrained(both)
    return model, adapter, both


def engine_with(folder: Path, **settings: Any) -> Engine:
    common: dict[str, Any] = {"dtype": "float32", "kv_cache_bytes": 2**22, "block_size": 8, "threads": 1}
    return Engine(Settings(model_id=str(folder), **common, **settings))


def play(engine: Engine, adapter: str, **params: Any) -> Player:
    """Rows of the prompts, and beside them one without an adapter."""
    played = Player(engine, list(range(1, engine.ready.num_blocks + 1)), 20, until=engine.rows.step)
    names = [adapter] * len(PROMPTS)
    starts = [
        played.start(row, prompt, COUNT, ignore_eos=True, adapter=name, **params)
        for row, (prompt, name) in enumerate(zip(PROMPTS, names, strict=True))
    ]
    played.run([*starts, played.start(9, PROMPTS[0], COUNT, ignore_eos=True)])
    return played


def check_equal(found: Player, expected: Player) -> None:
    for row in range(len(PROMPTS)):
        assert found.ids[row] == expected.ids[row]
        ids, wanted = (
            [sequence.ids for sequence in played.sequences.get(row, ())] for played in (found, expected)
        )
        assert ids == wanted
        scores = expected.prompt_logprobs.get(row, [])
        assert found.prompt_logprobs.get(row, []) == pytest.approx(scores, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("speculate", [0, 3])
def test_rows_with_an_adapter_do_what_rows_of_the_merged_model_do(
    made: tuple[Path, Path, Path], speculate: int
) -> None:
    model, adapter, both = made
    engine, other = engine_with(model, speculate=speculate), engine_with(both, speculate=speculate)
    load_adapters(engine, {"a": adapter})
    for params in FEATURES.values():
        check_equal(play(engine, "a", **params), play(other, "", **params))
    if speculate:
        assert sum(step.proposed_tokens for step in play(engine, "a").steps) > 0


def test_adapters_are_there_when_a_model_wakes(made: tuple[Path, Path, Path]) -> None:
    model, adapter, _ = made
    engine = engine_with(model)
    load_adapters(engine, {"a": adapter})
    before = play(engine, "a").ids
    engine.sleep()
    engine.wake_up(lambda text: None)
    assert play(engine, "a").ids == before
