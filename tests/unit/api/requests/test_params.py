"""Whether tokens are drawn, what is left of the sampling parameters then, and their defaults."""

import json
from pathlib import Path
from typing import Any

import pytest

from api.requests.params import DRAW_ONLY, draws, load_sampling_defaults, sampling_params
from common.messages.request import SamplingParams
from common.settings.settings import SettingError, Settings
from tests.support.generation_params import generation_params
from tests.support.tokenizer import model_tokenizer

TOKENIZER = model_tokenizer()


def sampling(**fields: Any) -> SamplingParams | None:
    return sampling_params(generation_params(**fields), TOKENIZER)


@pytest.mark.parametrize(
    "fields",
    [
        {"do_sample": True},
        {"temperature": 0.9},
        {"top_k": 1},
        {"top_p": 0.0},
        {"min_p": 0.1},
        {"typical_p": 0.9},
        {"top_p_decay": 0.9},
    ],
)
def test_each_sampling_field_alone_turns_sampling_on(fields: dict[str, Any]) -> None:
    first, second = sampling(**fields), sampling(**fields)
    assert first is not None and second is not None
    assert first.temperature == fields.get("temperature", 1.0)
    assert 0 <= first.seed < 2**63 and first.seed != second.seed
    assert sampling(**fields | {"temperature": 0.0}) is None


@pytest.mark.parametrize(
    "fields", [{}, {"top_k": 0}, {"top_k": -1}, {"seed": 3}, {"top_p_min": 0.5}, {"top_p_reset_ids": [1]}]
)
def test_neutral_parameters_leave_decoding_greedy(fields: dict[str, Any]) -> None:
    assert not draws(generation_params(**fields))
    assert sampling(**fields, raw_logprobs=True) is None


def test_penalties_alone_leave_decoding_greedy() -> None:
    found = sampling(repetition_penalty=1.2, seed=5, temperature=1.0, raw_logprobs=True)
    assert found == SamplingParams(temperature=0.0, repetition_penalty=1.2, raw_logprobs=True)


def test_greedy_decoding_drops_sampling_parameters() -> None:
    found = sampling(temperature=0.0, top_k=5, top_p=0.5, min_p=0.1, seed=5, top_p_min=0.2, bad_words=["dog"])
    assert found is not None and found.bad_words
    assert all(getattr(found, name) == getattr(SamplingParams(), name) for name in DRAW_ONLY)


def test_top_k_is_at_most_the_vocabulary_and_biases_of_zero_are_dropped() -> None:
    found = sampling(top_k=10**9, logit_bias=[(5, 0.0), (6, -1.5)], seed=7)
    assert found == SamplingParams(temperature=1.0, top_k=TOKENIZER.size, logit_bias=[(6, -1.5)], seed=7)


def test_bad_words_are_spelled_within_a_text_and_after_a_space() -> None:
    found = sampling(bad_words=["dog"])
    assert found == SamplingParams(bad_words=[TOKENIZER.backend.encode(text).ids for text in ("dog", " dog")])


# --- defaults -----------------------------------------------------------------------------------------------

QWEN = {
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "do_sample": True,
    "eos_token_id": [1, 2],
    "min_p": None,
}


def write(directory: Path, content: Any) -> Path:
    (directory / "generation_config.json").write_text(json.dumps(content))
    return directory


def test_values_are_the_model_s_unless_settings_say_otherwise(tmp_path: Path) -> None:
    model, other = write(tmp_path, QWEN), tmp_path / "other"
    other.mkdir()
    of_other = {"repetition_penalty": 1.05, "max_new_tokens": 2048}
    write(other, of_other)
    mode = {"logprobs_mode": "raw_logprobs"}
    of_model = {"temperature": 0.6, "top_k": 20, "top_p": 0.95} | mode
    assert load_sampling_defaults(model, Settings()) == of_model
    assert load_sampling_defaults(model, Settings(generation_config="vllm")) == mode
    elsewhere = Settings(generation_config=str(other))
    assert load_sampling_defaults(model, elsewhere) == of_other | mode
    argv = ["--override-generation-config", '{"temperature": 0, "min_p": 0.1}']
    assert load_sampling_defaults(model, Settings.read(argv, {})) == of_model | {
        "temperature": 0,
        "min_p": 0.1,
    }
    assert load_sampling_defaults(tmp_path / "without", Settings(logprobs_mode="raw_logits")) == {
        "logprobs_mode": "raw_logits"
    }


@pytest.mark.parametrize(
    ("content", "settings", "words"),
    [
        (QWEN | {"top_p": 1.5}, {}, "GENERATION_CONFIG: top_p in .*at least 0 and at most 1. Given: 1.5"),
        (QWEN | {"top_k": "20"}, {}, "top_k in .*a whole number"),
        (QWEN, {"generation_config": "/nowhere"}, "/nowhere/generation_config.json does not exist"),
    ],
)
def test_what_cannot_be_a_default_ends_the_start(
    tmp_path: Path, content: Any, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(SettingError, match=words):
        load_sampling_defaults(write(tmp_path, content), Settings(**settings))
