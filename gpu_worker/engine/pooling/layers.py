"""Pooling layers: what comes after a model's last hidden states, read from the model's files: the linear
layers of sentence-transformers' module Dense, and the head of a classifier.
"""

from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from common.model_files import read_json
from gpu_worker.engine.quantization.checkpoint import file_slices
from gpu_worker.protocol import UnservableModel

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "Tanh": nn.Tanh,
    "Identity": nn.Identity,
    "ReLU": nn.ReLU,
    "GELU": nn.GELU,
    "Sigmoid": nn.Sigmoid,
    "SiLU": nn.SiLU,
}
"""Classes of torch that a module Dense may name."""
SCORE = "score.weight"
"""The head of a decoder with a classifier, in transformers."""


def read_dense(folders: Iterable[Path]) -> nn.Sequential:
    """The layers of the modules Dense in these folders, float32 on the CPU. Raises UnservableModel."""
    return nn.Sequential(*(layer for folder in folders for layer in dense_layers(folder)))


def dense_layers(folder: Path) -> list[nn.Module]:
    config = read_json(folder / "config.json")
    name = str(config.get("activation_function") or "torch.nn.modules.activation.Tanh").rpartition(".")[2]
    if name not in ACTIVATIONS:
        raise UnservableModel(f"its module {folder.name} has the activation {name}, which is not served")
    file = folder / "model.safetensors"
    if not file.is_file():
        raise UnservableModel(f"its module {folder.name} has no model.safetensors")
    weights = load_file(file)
    return [linear_of(weights["linear.weight"], weights.get("linear.bias")), ACTIVATIONS[name]()]


def linear_of(weight: torch.Tensor, bias: torch.Tensor | None = None) -> nn.Linear:
    """weight float [outputs, inputs] and bias float [outputs] → the layer, in float32"""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None)
    layer.weight = nn.Parameter(weight.float(), requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias.float(), requires_grad=False)
    return layer


def read_score_head(path: Path) -> nn.Linear:
    """The head of a decoder that classifies. Raises UnservableModel."""
    found = dict(file_slices(path)).get(SCORE)
    if found is None:
        raise UnservableModel(f"it is a classifier without a {SCORE}")
    return linear_of(found[...])


def output_size(layers: Iterable[nn.Module], hidden_size: int) -> int:
    """Values that come out of layers that get `hidden_size`."""
    for layer in layers:
        hidden_size = layer.out_features if isinstance(layer, nn.Linear) else hidden_size
    return hidden_size
