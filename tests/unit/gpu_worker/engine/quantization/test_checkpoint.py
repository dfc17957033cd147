"""A quantised checkpoint is served with the ids of plain weights of the same numbers."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from common.settings.settings import SettingError
from tests.support.engine import quantized_models, tiny_models
from tests.support.engine.quantized_models import FORMATS, multiplies_blocks
from tests.support.engine.tiny_engine import engine_of, play

NEW_TOKENS = 40
IN_BLOCKS = ("gptq", "awq", "w8a8-int8")
SLOW = (
    *IN_BLOCKS,
    "gptq-v2",
    "gptq-2",
    "gptq-8",
    "fbgemm_fp8",
    "w8a16",
    "w4a16",
    "w8a8-fp8",
    "bitsandbytes-4",
)
PROMPTS = ([5, 6, 7], list(range(3, 40)))


@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=pytest.mark.slow) if form in SLOW else form for form in FORMATS]
)
def test_ids_are_those_of_the_numbers_that_a_checkpoint_means(form: str, tmp_path: Path) -> None:
    reference = quantized_models.save(tmp_path, *FORMATS[form])
    expected = [tiny_models.generate(reference, prompt, NEW_TOKENS) for prompt in PROMPTS]
    ids = play(engine_of(tmp_path), dict(enumerate(PROMPTS)))
    assert list(ids.values()) == expected


@pytest.mark.parametrize("form", IN_BLOCKS)
def test_integers_are_multiplied_in_blocks_with_the_bits_of_plain_weights(form: str, tmp_path: Path) -> None:
    quantized_models.save(tmp_path, *FORMATS[form])
    own, plain = (engine_of(folder, dtype="bfloat16") for folder in (tmp_path, tmp_path / "plain"))
    rows = dict(enumerate(PROMPTS))
    assert play(own, rows) == play(plain, rows)
    if not multiplies_blocks():
        pytest.skip("weights are widened on this processor")
    layers = own.loaded.model.model.layers
    assert all(layer.mlp.down_proj.blocks and layer.self_attn.q_proj.blocks for layer in layers)
    assert not plain.loaded.model.model.layers[0].mlp.down_proj.blocks


def test_experts_are_dequantised_at_load(tmp_path: Path) -> None:
    """Each has a matrix of its own in the checkpoint, and all are one parameter of the model."""
    write, config = FORMATS["gptq"]
    reference = quantized_models.save(tmp_path, write, config, "Mixtral")
    expected = [tiny_models.generate(reference, prompt, NEW_TOKENS) for prompt in PROMPTS]
    assert list(play(engine_of(tmp_path), dict(enumerate(PROMPTS))).values()) == expected


@pytest.mark.parametrize(
    ("form", "field", "words"),
    [
        ("gptq", "scales", r"there is model\.layers\.1\.mlp\.up_proj\.qweight, but no .*up_proj\.scales"),
        ("fp8-tensor", "weight_scale", r"8-bit floats without weight_scale"),
    ],
)
def test_a_layer_without_its_scales_is_refused(form: str, field: str, words: str, tmp_path: Path) -> None:
    quantized_models.save(tmp_path, *FORMATS[form])
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[f"model.layers.1.mlp.up_proj.{field}"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SettingError, match=words) as caught:
        engine_of(tmp_path)
    assert caught.value.name == "model_id" and "\n" not in str(caught.value)


def test_weights_of_another_method_than_the_named_one_are_refused(tmp_path: Path) -> None:
    quantized_models.save(tmp_path, *FORMATS["bitsandbytes-8"])
    path = tmp_path / "config.json"
    config = json.loads(path.read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    path.write_text(json.dumps(config))
    with pytest.raises(
        SettingError, match=r"weights of type I8 \(model\.\S+\) that its method does not have"
    ):
        engine_of(tmp_path)
