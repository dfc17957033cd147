"""Every family of models and every form of weights, tiny and random: served with the ids of transformers'
`generate` of the same numbers.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from common.messages.request import BeamParams
from common.model_files import starting_ids
from tests.support.engine import quantized_models, tiny_models
from tests.support.engine.batch_player import player
from tests.support.engine.pictures import models as pictures
from tests.support.engine.quantized_models import FORMATS, rounded
from tests.support.engine.tiny_engine import (
    MANY_NEW_TOKENS,
    NEW_TOKENS,
    answers,
    check_ids,
    engine_of,
    prompts,
)
from tests.support.engine.tiny_models import ENCODER_DECODERS, FAMILIES, HYBRIDS

MOST_REPEATED = 0.625
"""Of the ids of an answer; others prove little."""
UNPADDED = ("Nemotron-H", "Zamba2")
"""Their scans have a shortest step, so states decay at padding, too."""
Make = Callable[[Path], Any]
"""Saves a model in a folder → transformers' own with the numbers that are served."""
Case = tuple[Make, dict[str, Any]]
"""With these settings."""


def family(name: str) -> Case:
    return lambda folder: tiny_models.save(folder, *MODELS[name]), {}


def checkpoint(form: str, name: str = "Llama") -> Case:
    return lambda folder: quantized_models.save(folder, *FORMATS[form], name), {}


def at_load(method: str, name: str) -> Case:
    def make(folder: Path) -> Any:
        model, [prompt, *_] = tiny_models.save(folder, *FAMILIES[name]), prompts()
        other = rounded(model, method)
        assert answers(other, {0: prompt}) != answers(model, {0: prompt})
        return other

    return make, {"quantize": method}


def stretched(kind: str, name: str = "Llama", **settings: Any) -> Case:
    """Prompts are longer than the model was trained for."""

    def make(folder: Path) -> Any:
        short = {"max_position_embeddings": 64}
        if name in pictures.FAMILIES:
            model = pictures.save(folder, name, short).model
        else:
            model = tiny_models.save(folder, MODELS[name][0], MODELS[name][1] | short)
        config = AutoConfig.from_pretrained(folder)
        text = config.get_text_config()
        text.rope_parameters |= {"rope_type": kind, "factor": 2.0}
        text.head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        return type(model).from_pretrained(folder, config=config, dtype=torch.float32)

    return make, settings | {"rope_factor": 2.0}


def own_dynamic(folder: Path) -> Any:
    """A checkpoint that is stretched itself, and whose config has no size of heads."""
    model = stretched("dynamic", "Mixtral")[0](folder)
    path = folder / "config.json"
    changed = {"rope_parameters": model.config.rope_parameters, "head_dim": None}
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    return model


DYNAMIC = ("Mixtral", "Qwen3.5", "Qwen2-VL")
"""A config without the size of heads, positions that are given three times, and a model that sees, which is
served for text alone then.
"""
MODELS = FAMILIES | ENCODER_DECODERS | HYBRIDS
CASES: dict[str, Case] = {
    **{name: family(name) for name in MODELS},
    **{form: checkpoint(form) for form in FORMATS},
    "gptq experts": checkpoint("gptq", "Mixtral"),  # a matrix each in the checkpoint, one parameter in all
    **{method: at_load(method, "Llama-tied") for method in ("bitsandbytes-fp4", "eetq")},
    "fp8": at_load("fp8", "Mixtral"),
    "linear": stretched("linear"),
    **{f"dynamic {name}": stretched("dynamic", name, rope_scaling="dynamic") for name in DYNAMIC},
    "own dynamic": (own_dynamic, {}),
}
QUICK = (
    *("Llama-longrope", "Qwen3-MoE", "Gemma2", "GPT2", "DeepSeek-V3", "gpt-oss", "BART-forced"),
    *("LFM2", "Mamba2", "gptq-desc_act", "fp8-blocks", "bitsandbytes-4-nested", "gptq experts"),
    *("bitsandbytes-fp4", "eetq", "fp8", "linear", "own dynamic"),
    *(f"dynamic {name}" for name in DYNAMIC),
)


@pytest.mark.parametrize(
    ("name", "new_tokens"),
    [
        *((name, NEW_TOKENS) for name in QUICK),
        *(pytest.param(name, MANY_NEW_TOKENS, marks=pytest.mark.slow) for name in CASES),
    ],
)
def test_ids_are_those_of_generate(name: str, new_tokens: int, tmp_path: Path) -> None:
    """Alone, batched, in chunks of 7, resumed. Blocks of 8 tokens have no names where states are kept."""
    make, settings = CASES[name]
    model = make(tmp_path)
    expected, starting = answers(model, new_tokens=new_tokens), starting_ids(tmp_path)
    if starting:
        assert len({tuple(ids) for ids in expected.values()}) == len(expected), "the encoder says something"
    elif name in MODELS:
        assert all(1 - len(set(ids)) / new_tokens <= MOST_REPEATED for ids in expected.values())
    engine = engine_of(tmp_path, **settings)
    if name in HYBRIDS:
        assert not engine.ready.prefix_caching and engine.ready.max_rows > 0
        assert engine.loaded.states.packs is (name not in UNPADDED)
    assert "rope_factor" not in settings or engine.ready.context == 128
    check_ids(engine, expected, {row: prompt + starting for row, prompt in enumerate(prompts())})


def test_beams_of_an_encoder_decoder_are_those_of_generate(tmp_path: Path) -> None:
    model, prompt = tiny_models.save(tmp_path, *ENCODER_DECODERS["mT5"]), prompts()[2]
    best = tiny_models.generate(model, prompt, NEW_TOKENS, num_beams=3, early_stopping=False)
    beams, played = BeamParams(3, length_penalty=1.0, num_returned=1), player(engine_of(tmp_path))
    played.run([played.start(1, [*prompt, 0], NEW_TOKENS, beams=beams, ignore_eos=True)])
    assert list(played.sequences[1][0].ids) == best
    assert best != tiny_models.generate(model, prompt, NEW_TOKENS), "greedy finds another"
