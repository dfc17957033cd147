"""A quantised checkpoint has the ids that transformers gives it, or is refused with what to install; never
served by guess.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
from transformers.utils.quantization_config import QuantizationMethod

from common import model_files
from common.settings.settings import SettingError, Settings
from gpu_worker.engine.engine import Engine
from gpu_worker.engine.model.config import read_config
from gpu_worker.engine.quantization.checkpoint import METHODS
from tests.support.engine import tiny_models
from tests.support.engine.batch_player import Player

BLOCK = 32
NEW_TOKENS = 12
PROMPTS = ([5, 6, 7], list(range(3, 40)))
FP8 = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
    "modules_to_not_convert": ["lm_head"],
}


def engine_of(folder: Path, **settings: Any) -> Engine:
    return Engine(
        Settings(
            model_id=str(folder),
            dtype="float32",
            kv_cache_bytes=2**22,
            max_batch_prefill_tokens=64,
            threads=1,
            **settings,
        )
    )


def ids_of(engine: Engine) -> list[list[int]]:
    played = Player(engine, list(range(1, engine.ready.num_blocks + 1)))
    found = played.run(
        [played.start(row, prompt, NEW_TOKENS, ignore_eos=True) for row, prompt in enumerate(PROMPTS)]
    )
    return [found[row] for row in range(len(PROMPTS))]


def configure(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def quantize(folder: Path) -> None:
    """Weights of linear layers as 8-bit floats with a scale for each block, as DeepSeek publishes them."""
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if "_proj." in name]:
        rows, columns = tensors[name].shape
        blocks = tensors[name].float().view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
        scales = blocks.abs().amax((1, 3)) / 448
        tensors[name] = (blocks / scales[:, None, :, None]).view(rows, columns).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scales
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_8_bit_floats_give_the_ids_of_transformers(tmp_path: Path) -> None:
    plain = tiny_models.save(tmp_path, "Llama", tiny_models.LLAMA)
    quantize(tmp_path)
    configure(tmp_path, quantization_config=FP8)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    expected = [tiny_models.generate(reference, prompt, NEW_TOKENS) for prompt in PROMPTS]
    assert ids_of(engine_of(tmp_path)) == expected
    assert expected != [tiny_models.generate(plain, prompt, NEW_TOKENS) for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        (
            {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
            r"its weights are packed as marlin; gptq and gptq_v2 are read",
        ),
        ({"quant_method": "gptq", "bits": 5}, r"it has 5 bits; 2, 3, 4 and 8 are read"),
        (
            {"quant_method": "awq", "bits": 4, "version": "gemv"},
            r"its weights are packed as gemv; gemm is read",
        ),
        (
            {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
            r"its format is nvfp4-pack-quantized; .*pack-quantized.* are read",
        ),
        (
            {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}},
            r"its weights are sparse \(sparse-24-bitmask\)",
        ),
        ({"quant_method": "hqq"}, r"is quantised \(hqq\): .*[Hh][Qq][Qq]"),
        ({"quant_method": "modelopt"}, r"is quantised \(modelopt\); these are known: .*gptq"),
        ({"bits": 4}, r"is quantised \(method not named\)"),
        ({"quant_method": "exl2", "bits": 4.65}, r"is quantised \(exl2\): ExLlamaV2's layout .* is not read"),
        ({"quant_method": "aqlm"}, r"is quantised \(aqlm\): .*[Aa][Qq][Ll][Mm]"),
        ({"quant_method": "quanto"}, r"is quantised \(quanto\): .*quanto"),
        ({"quant_method": "torchao"}, r"is quantised \(torchao\): .*torchao"),
    ],
    ids=[
        "marlin",
        "bits",
        "gemv",
        "nvfp4",
        "sparse",
        "hqq",
        "unknown",
        "nameless",
        "exl2",
        "aqlm",
        "quanto",
        "torchao",
    ],
)
def test_a_quantisation_method_that_is_not_read_is_refused(
    quantization: dict[str, Any], words: str, tmp_path: Path
) -> None:
    tiny_models.save(tmp_path, "Llama", tiny_models.LLAMA)
    configure(tmp_path, quantization_config=quantization)
    refused(tmp_path, words)


def test_quantize_is_what_the_checkpoint_says(tmp_path: Path) -> None:
    """Names of vLLM's kernels are those of their method; plain weights do not become AWQ's or GPTQ's."""
    tiny_models.save(tmp_path, "Llama", tiny_models.LLAMA)
    given = {name: Settings.read(["--quantize", name], {}) for name in ("awq", "awq_marlin", "gptq", "fp8")}
    for name in ("awq", "gptq"):
        with pytest.raises(SettingError, match=rf"^QUANTIZE: {name} is not served: .* weights are plain"):
            read_config(tmp_path, given[name])
    read_config(tmp_path, given["fp8"])
    configure(tmp_path, quantization_config={"quant_method": "awq", "bits": 4, "group_size": 128})
    for name in ("awq", "awq_marlin"):
        read_config(tmp_path, given[name])
    with pytest.raises(SettingError, match=r"^QUANTIZE: gptq is not served: .* \(awq\)"):
        read_config(tmp_path, given["gptq"])


def test_every_method_that_can_be_read_is_a_value_of_quantize() -> None:
    for method in (*METHODS, *(method.value for method in QuantizationMethod)):
        assert Settings.read(["--quantize", method], {}).quantize == method.replace("_", "-")


def test_8_bit_weights_without_a_quantisation_config_are_refused(tmp_path: Path) -> None:
    tiny_models.save(tmp_path, "Llama", tiny_models.LLAMA)
    quantize(tmp_path)
    refused(
        tmp_path,
        r"has weights of type F8_E4M3 \(model\.layers\.0\.\S+\), and its config\.json says nothing of them",
    )


def test_8_bit_experts_without_a_quantisation_config_are_refused(tmp_path: Path) -> None:
    tiny_models.save(tmp_path, "Llama", tiny_models.LLAMA)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj"
    tensors |= {name: torch.ones(4, 2, 2).to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.ones(4)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    refused(tmp_path, rf"weights of type F8_E4M3 \({name}\), and its config\.json says nothing of them")


def test_missing_weights_are_refused(tmp_path: Path) -> None:
    tiny_models.save(tmp_path, "Llama", tiny_models.LLAMA)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    refused(tmp_path, r"has no weights for model\.layers\.1\.mlp\.up_proj\.weight$")


def refused(folder: Path, words: str) -> None:
    with pytest.raises(SettingError, match=words) as caught:
        engine_of(folder)
    assert caught.value.name == "model_id" and "\n" not in str(caught.value)


def test_long_loading_reports_its_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_files, "PROGRESS_S", 0.0)
    model = tiny_models.save(tmp_path, "Llama", tiny_models.LLAMA)
    lines: list[str] = []
    Engine(
        Settings(model_id=str(tmp_path), kv_cache_bytes=2**22, max_batch_prefill_tokens=64, threads=1),
        lines.append,
    )
    total = len(list(model.parameters()))
    assert f"Loading weights: {total} of {total}" in lines


@pytest.mark.parametrize("kind", [None, "linear", "dynamic"])
def test_rope_scaling_serves_longer_prompts(kind: str | None, tmp_path: Path) -> None:
    """One prompt is longer than the model was trained for."""
    tiny_models.save(tmp_path, "Llama", tiny_models.LLAMA | {"max_position_embeddings": 32})
    engine = engine_of(tmp_path, rope_scaling=kind, rope_factor=2.0)
    config: LlamaConfig = AutoConfig.from_pretrained(tmp_path)
    config.rope_parameters |= {"rope_type": kind or "linear", "factor": 2.0}  # type: ignore[operator]
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, config=config, dtype=torch.float32)
    assert engine.ready.context == 2 * config.max_position_embeddings
    assert ids_of(engine) == [tiny_models.generate(reference, prompt, NEW_TOKENS) for prompt in PROMPTS]


@pytest.mark.parametrize(("family", "kind"), [("GPT2", "gpt2"), ("Gemma3", "gemma3_text")])
def test_rope_scaling_needs_plain_rotary_positions(family: str, kind: str, tmp_path: Path) -> None:
    """None at all, or others for each type of layer."""
    tiny_models.save(tmp_path, *tiny_models.FAMILIES[family])
    with pytest.raises(SettingError, match=f"ROPE_FACTOR: {kind} has no plain rotary positions to stretch"):
        engine_of(tmp_path, rope_factor=2.0)


def test_code_of_a_checkpoint_runs_only_when_trusted(tmp_path: Path) -> None:
    tiny_models.save(tmp_path, "Llama", tiny_models.LLAMA)
    configure(
        tmp_path,
        model_type="mine",
        auto_map={"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"},
    )
    (tmp_path / "mine.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class Config(LlamaConfig):\n    model_type = 'mine'\n"
        "class Model(LlamaForCausalLM):\n    config_class = Config\n"
    )
    refused(tmp_path, "Python code along, which is run with TRUST_REMOTE_CODE only")
    engine = engine_of(tmp_path, trust_remote_code=True)
    assert type(engine.loaded.model).__name__ == "Model"


@pytest.mark.parametrize("damage", ["truncated", "longer", "no header", "a long header", "empty"])
def test_a_damaged_file_ends_the_start_with_its_name(damage: str, tmp_path: Path) -> None:
    tiny_models.save(tmp_path, "Llama", tiny_models.LLAMA)
    file = tmp_path / "model.safetensors"
    data = file.read_bytes()
    damaged, fault = {
        "truncated": (data[:-7], f"is damaged: it has {len(data) - 7} bytes, and {len(data)} by its header"),
        "longer": (data + b"0", f"is damaged: it has {len(data) + 1} bytes, and {len(data)} by its header"),
        "no header": (data[:8] + b"\xff" * 9000, "is no safetensors file, or damaged"),
        "a long header": (b"\xff" * 100, "is no safetensors file, or damaged"),
        "empty": (b"", "is no safetensors file, or damaged"),
    }[damage]
    file.write_bytes(damaged)
    with pytest.raises(SettingError) as caught:
        engine_of(tmp_path)
    assert str(caught.value).startswith(f"MODEL_ID: {tmp_path} cannot be served: {file} {fault}")
    assert "\n" not in str(caught.value)
