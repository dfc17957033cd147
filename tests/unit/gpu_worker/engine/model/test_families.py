"""Every family of models, tiny and random: served with the ids of transformers' `generate`."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from common.messages.request import BeamParams
from common.model_files import starting_ids
from tests.support.engine import tiny_models
from tests.support.engine.batch_player import player
from tests.support.engine.tiny_engine import MANY_NEW_TOKENS, NEW_TOKENS, check_ids, engine_of, prompts
from tests.support.engine.tiny_models import ENCODER_DECODERS, FAMILIES, SEEING

MOST_REPEATED = 0.625
"""Of the ids of an answer; others prove little."""
QUICK = (
    "Llama-longrope",
    "Qwen3-MoE",
    "Gemma2",
    "GPT2",
    "DeepSeek-V3",
    "gpt-oss",
    "BART-forced",
)
MODELS = FAMILIES | SEEING | ENCODER_DECODERS
SERVED = [
    *((name, NEW_TOKENS) for name in QUICK),
    *(pytest.param(name, MANY_NEW_TOKENS, marks=pytest.mark.slow) for name in MODELS),
]


Saved = tuple[Path, dict[int, list[int]]]
"""The folder of a model, and the ids that transformers generates for each prompt."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Saved]:
    @cache
    def save(family: str, new_tokens: int = NEW_TOKENS) -> Saved:
        folder = tmp_path_factory.mktemp("model")
        model = tiny_models.save(folder, *MODELS[family])
        return folder, {
            row: tiny_models.generate(model, prompt, new_tokens) for row, prompt in enumerate(prompts())
        }

    return save


@pytest.mark.parametrize(("family", "new_tokens"), SERVED)
def test_ids_are_those_of_generate(family: str, new_tokens: int, saved: Callable[..., Saved]) -> None:
    folder, expected = saved(family, new_tokens)
    starting = starting_ids(folder)
    if starting:
        assert len({tuple(ids) for ids in expected.values()}) == len(expected), "the encoder says something"
    else:
        assert all(1 - len(set(ids)) / new_tokens <= MOST_REPEATED for ids in expected.values())
    fresh = {row: prompt + starting for row, prompt in enumerate(prompts())}
    check_ids(engine_of(folder), expected, fresh)


def test_beams_of_an_encoder_decoder_are_those_of_generate(tmp_path: Path) -> None:
    model, prompt = tiny_models.save(tmp_path, *ENCODER_DECODERS["mT5"]), prompts()[2]
    best = tiny_models.generate(model, prompt, NEW_TOKENS, num_beams=3, early_stopping=False)
    beams, played = BeamParams(3, length_penalty=1.0, num_returned=1), player(engine_of(tmp_path))
    played.run([played.start(1, [*prompt, 0], NEW_TOKENS, beams=beams, ignore_eos=True)])
    assert list(played.sequences[1][0].ids) == best
    assert best != tiny_models.generate(model, prompt, NEW_TOKENS), "greedy finds another"
