"""Pooling head: takes the place of a decoder's head, so that a forward brings vectors instead of logits.

A decoder's tokens see only those before them, so the vector of the last one stands for the whole prompt, and
prompts are computed in chunks, with shared blocks, as those of generating models.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from common.messages.request import CLASSIFY
from common.pooling import PoolingConfig
from gpu_worker.engine.parallel.shards import TpPlan
from gpu_worker.engine.parallel.stage_model import ModelStage, StageEnd
from gpu_worker.engine.pooling.layers import output_size, read_dense, read_score_head
from gpu_worker.protocol import UnservableModel


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
