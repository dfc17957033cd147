"""Every family of models, tiny and random: served with the ids of transformers' `generate`, or refused with
the cause.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from common.messages.request import BeamParams
from common.model_files import starting_ids
from common.settings.settings import SettingError
from gpu_worker.engine.model import weights as config
from tests.support.engine import tiny_models
from tests.support.engine.batch_player import player
from tests.support.engine.tiny_engine import MANY_NEW_TOKENS, NEW_TOKENS, check_ids, engine_of, prompts
from tests.support.engine.tiny_models import ENCODER_DECODERS, FAMILIES, GPT, LLAMA, SEEING, SIZES, T5, VOCAB

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
COMPRESSED = SIZES | {
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 32,
}
CHUNKED = LLAMA | {"head_dim": 16, "attention_chunk_size": 16, "num_local_experts": 2}
MINIMAX = (
    LLAMA
    | {"num_local_experts": 2, "head_dim": 16}
    | {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
)
"""It has states in a cache of its own, whatever the config says of its layers."""
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (
        "Mpt",
        {"vocab_size": VOCAB, "d_model": 64, "n_layers": 2, "n_heads": 4, "attn_config": {"alibi": False}},
        "has no ALiBi",
    ),
    ("Falcon", SIZES | {"alibi": True}, "ALiBi"),
    ("Llama4Text", CHUNKED, "chunked_attention; only"),
    # its layers without rotary positions scale queries by the cache's count
    ("Llama4Text", CHUNKED | {"layer_types": ["full_attention"] * 3}, "counts tokens by a cache of its own"),
    (
        "Moshi",
        LLAMA | {"ffn_dim": 128, "sliding_window": 16},
        "its cache has a window of 16 tokens and its mask none",
    ),
    ("Rwkv", {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2}, "no attention heads, and no"),
    ("Zaya", COMPRESSED, "ZayaCCAProjection, which has states, returns more than hidden states"),
    ("GPTJ", GPT, "is not served any more; GPT-NeoX"),
    ("CodeGen", GPT, "is not served any more; StarCoder2"),
    ("XGLM", SIZES | {"d_model": 64, "num_layers": 2, "attention_heads": 4}, "is not served any more; Qwen3"),
    ("Helium", LLAMA | {"head_dim": 8}, "the code of HeliumForCausalLM fails"),
    ("MiniMax", MINIMAX, "see each other by other ways than attention"),
    ("LongT5", T5, "encoder-decoder model of type longt5; served are bart"),
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


@pytest.mark.parametrize(("family", "sizes", "words"), REFUSED)
def test_unservable_families_are_refused_with_the_cause(
    family: str, sizes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    tiny_models.save(tmp_path, family, sizes)
    with pytest.raises(SettingError, match=words) as caught:
        engine_of(tmp_path)
    assert caught.value.name == "model_id" and "\n" not in str(caught.value)


def test_masks_other_than_causal_or_window_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "LAYER_TYPES", {"full_attention", "chunked_attention"})
    tiny_models.save(tmp_path, "Llama4Text", CHUNKED)
    with pytest.raises(SettingError, match="neither causal nor a sliding window"):
        engine_of(tmp_path)


def test_what_cannot_be_combined_is_refused_by_name(tmp_path: Path) -> None:
    tiny_models.save(tmp_path, *ENCODER_DECODERS["T5"])
    with pytest.raises(SettingError, match="KV_CACHE_DTYPE: is not served with an encoder-decoder model"):
        engine_of(tmp_path, kv_cache_dtype="fp8_e4m3fn")
