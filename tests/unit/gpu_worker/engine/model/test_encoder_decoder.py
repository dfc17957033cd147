"""Encoder-decoder models, tiny and random: the ids of transformers' `generate`, however rows are batched,
chunked and resumed.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from common.messages.request import BeamParams
from common.model_files import starting_ids
from common.settings.settings import SettingError
from tests.support.engine import tiny_models
from tests.support.engine.batch_player import player
from tests.support.engine.tiny_engine import NEW_TOKENS, check_ids, engine_of
from tests.support.parameters.slow_but import slow_but

VOCAB = 256
T5 = tiny_models.T5 | {"vocab_size": VOCAB}
BART = {
    "vocab_size": VOCAB,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "max_position_embeddings": 128,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
    "init_std": 0.25,
    "tie_word_embeddings": False,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "T5": ("T5", T5),
    "mT5": ("MT5", T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "BART": ("Bart", BART),
    "BART-forced": ("Bart", BART | {"forced_bos_token_id": 7}),
    "mBART": ("MBart", BART | {"scale_embedding": True}),
    "Pegasus": ("Pegasus", BART),
}


def make(folder: Path, name: str) -> Any:
    return tiny_models.save(folder, *MODELS[name])


def expected(model: Any, prompt: Sequence[int], num_tokens: int, **options: Any) -> list[int]:
    """What `generate` says after the ids that start the decoder."""
    ids = torch.tensor([prompt])
    settings = {"do_sample": False, "eos_token_id": None, "attention_mask": torch.ones_like(ids)} | options
    num_starting = 1 + (model.generation_config.forced_bos_token_id is not None)
    output = model.generate(ids, max_new_tokens=num_tokens + num_starting - 1, **settings)
    return [int(token) for token in output[0, num_starting:]]


def prompts() -> dict[int, list[int]]:
    torch.manual_seed(1)
    return {row: torch.randint(8, VOCAB, (length,)).tolist() for row, length in enumerate((1, 20, 50, 70))}


@pytest.mark.parametrize(
    "name",
    slow_but(["BART-forced"], ["T5", "mT5", "BART-forced", "mBART", "BART", "Pegasus"]),
)
def test_ids_are_those_of_generate(name: str, tmp_path: Path) -> None:
    model = make(tmp_path, name)
    starting = starting_ids(tmp_path)
    wanted = {row: expected(model, ids, NEW_TOKENS) for row, ids in prompts().items()}
    assert len({tuple(ids) for ids in wanted.values()}) == len(wanted), "the encoder says something"
    check_ids(engine_of(tmp_path), wanted, {row: ids + starting for row, ids in prompts().items()})


def test_beams_are_those_of_generate(tmp_path: Path) -> None:
    model, engine = make(tmp_path, "mT5"), engine_of(tmp_path)
    prompt, beams = prompts()[2], BeamParams(3, length_penalty=1.0, num_returned=1)
    best = expected(model, prompt, NEW_TOKENS, num_beams=3, early_stopping=False)
    played = player(engine)
    played.run([played.start(1, [*prompt, 0], NEW_TOKENS, beams=beams, ignore_eos=True)])
    assert list(played.sequences[1][0].ids) == best
    assert best != expected(model, prompt, NEW_TOKENS), "greedy finds another"


def test_what_cannot_be_combined_is_refused_by_name(tmp_path: Path) -> None:
    make(tmp_path, "T5")
    cause = "KV_CACHE_DTYPE: is not served with an encoder-decoder model"
    with pytest.raises(SettingError, match=cause):
        engine_of(tmp_path, kv_cache_dtype="fp8_e4m3fn")


def test_other_encoder_decoder_models_are_refused_by_name(tmp_path: Path) -> None:
    tiny_models.save(tmp_path, "LongT5", T5)
    with pytest.raises(SettingError, match="encoder-decoder model of type longt5; served are bart"):
        engine_of(tmp_path)


@pytest.mark.parametrize(
    ("config", "generation", "ids"),
    [
        ({"decoder_start_token_id": 0}, {}, [0]),
        ({"decoder_start_token_id": 2, "forced_bos_token_id": 5}, {}, [2, 5]),
        ({"bos_token_id": 3}, {}, [3]),
        ({"decoder_start_token_id": 2}, {"decoder_start_token_id": 4, "forced_bos_token_id": 0}, [4, 0]),
    ],
)
def test_ids_that_start_the_decoder(
    config: dict[str, Any], generation: dict[str, Any], ids: list[int], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config | {"is_encoder_decoder": True}))
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert starting_ids(tmp_path) == ids
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert starting_ids(tmp_path) == []
