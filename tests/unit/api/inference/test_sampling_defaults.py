"""Default sampling values: those of generation_config.json, as GENERATION_CONFIG says."""

import json
from pathlib import Path
from typing import Any

import pytest

from api.inference.sampling import load_sampling_defaults
from common.settings.settings import SettingError, Settings

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
    write(other, {"repetition_penalty": 1.05, "max_new_tokens": 2048})
    of_model = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    assert load_sampling_defaults(model, Settings()) == of_model
    assert load_sampling_defaults(model, Settings(generation_config="vllm")) == {}
    elsewhere = Settings(generation_config=str(other))
    assert load_sampling_defaults(model, elsewhere) == {"repetition_penalty": 1.05, "max_new_tokens": 2048}
    argv = ["--override-generation-config", '{"temperature": 0, "min_p": 0.1}']
    assert load_sampling_defaults(model, Settings.read(argv, {})) == of_model | {
        "temperature": 0,
        "min_p": 0.1,
    }
    assert load_sampling_defaults(tmp_path / "without", Settings()) == {}


@pytest.mark.parametrize(
    ("content", "settings", "words"),
    [
        (QWEN | {"top_p": 1.5}, {}, "GENERATION_CONFIG: top_p in .*at least 0 and at most 1. Given: 1.5"),
        (QWEN | {"top_k": "20"}, {}, "top_k in .*a whole number"),
        (QWEN, {"generation_config": "/nowhere"}, "/nowhere/generation_config.json does not exist"),
        (QWEN, {"override_generation_config": "{"}, "OVERRIDE_GENERATION_CONFIG: '{' is not JSON"),
        (QWEN, {"override_generation_config": '{"eos_token_id": 1}'}, "an object with some of temperature"),
        (QWEN, {"override_generation_config": '{"max_new_tokens": 0}'}, "at least 1. Given: 0"),
    ],
)
def test_what_cannot_be_a_default_ends_the_start(
    tmp_path: Path, content: Any, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(SettingError, match=words):
        load_sampling_defaults(write(tmp_path, content), Settings(**settings))
