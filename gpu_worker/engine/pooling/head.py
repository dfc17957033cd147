"""Pooling head: takes the place of a decoder's head, so that a forward brings vectors instead of logits.

A decoder's tokens see only those before them, so the vector of the last one stands for the whole prompt, and
prompts are computed in chunks, with shared blocks, as those of generating models. What comes after the last
hidden states is read from the model's files: the linear layers of sentence-transformers' module Dense, and
the head of a classifier.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from common.messages.request import CLASSIFY
from common.model_files import read_json
from common.pooling import PoolingConfig
from gpu_worker.engine.parallel.shards import TpPlan
from gpu_worker.engine.parallel.stages import ModelStage, StageEnd
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


class PoolingHead(nn.Module):
    """Ends the forward with what its layers make of hidden states: some models change logits after their
    head.

    Attributes:
        size: values of a vector.
    """

    def __init__(self, layers: nn.Sequential, hidden_size: int) -> None:
        super().__init__()
        self.layers = layers
        self.size = output_size(layers, hidden_size)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """states [1, tokens, hidden] of the model's dtype. Raises StageEnd with the vectors [1, tokens,
        size].
        """
        raise StageEnd(self.layers(states))


def head_name(model: Any) -> str:
    """The name of a model's head. Raises UnservableModel without one."""
    head = model.get_output_embeddings()
    name = next((name for name, module in model.named_modules() if module is head), "")
    if head is None or not name:
        raise UnservableModel("it has no head whose input could be its vectors")
    return name


def replace_head(
    model: Any, plan: TpPlan, stage: ModelStage, path: Path, pooling: PoolingConfig
) -> tuple[TpPlan, int]:
    """Replace the head of a decoder → the plan of what is left, and the values of a vector. A stage that is
    not the last has no head.
    """
    hidden_size = model.config.hidden_size
    layers = nn.Sequential(read_score_head(path)) if pooling.kind == CLASSIFY else read_dense(pooling.dense)
    size = output_size(layers, hidden_size)
    if size != pooling.size:
        raise UnservableModel(f"its vectors have {size} values, and its files say {pooling.size}")
    if not stage.is_last:
        return plan, size
    name = head_name(model)
    layers.to(model.dtype)
    model.set_submodule(name, PoolingHead(layers, hidden_size))
    kept = TpPlan(
        {key: shards for key, shards in plan.shards.items() if not key.startswith(f"{name}.")},
        {key: style for key, style in plan.styles.items() if key != name},
    )
    return kept, size
