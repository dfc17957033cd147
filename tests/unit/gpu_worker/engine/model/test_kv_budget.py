"""KV scales: found under the names that checkpoints have for them."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from gpu_worker.engine.attention.kv_cache import AttentionSpec, LayerSpec
from gpu_worker.engine.model.kv_budget import scale_layers


@pytest.mark.parametrize(
    ("names", "scales"),
    [
        (("k_scale", "v_scale"), (0.25, 0.5)),
        (("k_proj.k_scale", "v_proj.v_scale"), (0.25, 0.5)),
        (("qkv_proj.k_scale", "qkv_proj.v_scale"), (0.25, 0.5)),
        (("k_proj.output_scale", "v_proj.output_scale"), (0.25, 0.5)),
        (("kv_scale", "q_scale"), (0.25, 0.25)),
        (("k_proj.weight_scale", "v_proj.input_scale"), (1.0, 1.0)),
    ],
    ids=str,
)
@pytest.mark.parametrize("prefix", ["model.", "language_model.model.", "model.language_model."])
def test_scales_are_found(
    prefix: str, names: tuple[str, str], scales: tuple[float, float], tmp_path: Path
) -> None:
    """Also of the text part of a model that sees images; a layer without any has 1."""
    layers = [nn.ModuleDict({"self_attn": nn.Module()}) for _ in range(2)]
    model = nn.ModuleDict({"model": nn.ModuleDict({"layers": nn.ModuleList(layers)})})
    numbers = zip(names, (0.25, 0.5), strict=True)
    tensors = {f"{prefix}layers.1.self_attn.{name}": torch.tensor(number) for name, number in numbers}
    save_file(tensors, tmp_path / "model.safetensors")
    spec = LayerSpec(AttentionSpec(2, 1, None, 1.0), 16, 16)
    found = scale_layers(model, tmp_path, {layer["self_attn"]: spec for layer in layers})
    assert [(layer.key_scale, layer.value_scale) for layer in found.values()] == [(1.0, 1.0), scales]
