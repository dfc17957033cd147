"""MODELS: further models, each a pool of its own."""

import pytest

from common.settings.settings import SettingError, Settings


def read(*words: str) -> Settings:
    return Settings.read(words, {})


def test_models_are_pools_by_their_names() -> None:
    settings = read("--models", "Qwen/Qwen3-0.6B", "small=/models/tiny", "/models/x.gguf")
    assert settings.model_id == "Qwen/Qwen3-0.6B"
    assert settings.pools == ("default", "small", "x")
    assert settings.other_models == {"small": "/models/tiny", "x": "/models/x.gguf"}
    assert settings.scale_to_zero


def test_with_model_id_all_of_models_are_further_ones() -> None:
    settings = read("--model-id", "smollm2", "--models", "a=x/y", "b=x/z")
    assert settings.model_id == "smollm2" and settings.pools == ("default", "a", "b")


def test_a_name_of_the_first_model_is_one_that_requests_may_use() -> None:
    assert read("--models", "fast=smollm2", "b=x/z").served_model_name == ("fast",)


def test_another_model_has_its_own_settings() -> None:
    """What belongs to MODEL_ID does not reach it, in a child process either."""
    settings = read("--models", "smollm2", "b=x/z", "--max-total-tokens", "512", "--num-workers", "2")
    other = settings.of_pool("b")
    assert (other.pool, other.model_id, other.served_model_name) == ("b", "x/z", ("b",))
    assert other.max_total_tokens is None and other.models == () and other.num_workers == 2
    assert Settings.read([], settings.environ() | other.environ()) == other
    assert settings.of_pool("default") is settings


def test_a_child_process_has_the_same_settings() -> None:
    settings = read("--models", "smollm2", "b=x/z")
    assert Settings.read([], settings.environ()) == settings


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("a=x/y", "b=x/z", "b=x/w"), "MODELS: 'b' is the name of two models: give one another name"),
        (("smollm2", "default=x/z"), "MODELS: 'default' is the name of two models"),
        (("smollm2", "b="), "MODELS: 'b=' is not a model, or a name and a model"),
        (("smollm2", "b{}=x"), "MODELS: 'b{}=x' is not a model"),
        (("smollm2", "b=x", "--nnodes", "2"), "MODELS: a worker on several machines (NNODES 2) serves one"),
    ],
)
def test_models_that_cannot_be_served_are_refused_by_name(words: tuple[str, ...], line: str) -> None:
    with pytest.raises(SettingError) as error:
        read("--models", *words)
    assert str(error.value).startswith(line)
