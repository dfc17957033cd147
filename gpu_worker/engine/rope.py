"""Rotary embeddings whose frequencies depend on how long a sequence is, for a line of tokens of many sequences.

transformers computes them once a forward, from the largest position in it. Here each token keeps the frequencies that it has when its
sequence is alone: those for the length at which its K was first computed, the prompt's or its own. Some models compute every K anew when
a sequence outgrows the length that its first frequencies are for.
"""

import inspect
from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from gpu_worker.engine.inputs import Inputs


class Rope:
    """Replaces the forward of one rotary module of type `dynamic` (NTK) or `longrope` (arXiv:2402.13753)."""

    def __init__(self, module: Any) -> None:
        self.module, self.plain = module, inspect.unwrap(type(module).forward)
        self.lengths = torch.ones(1, dtype=torch.int64)
        self.known: dict[int, tuple[torch.Tensor, float]] = {}
        module.forward = self.forward

    def begin(self, inputs: Inputs) -> None:
        """Called before each forward."""
        config = self.module.config
        if self.module.rope_type == "dynamic":
            self.lengths = inputs.lengths.clamp(min=config.max_position_embeddings)
        else:
            original = config.rope_parameters["original_max_position_embeddings"]
            self.lengths = inputs.lengths.clamp(original, original + 1)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """→ cosines and sines, each [1, tokens, dim]"""
        parts, order = [], []
        for length in torch.unique(self.lengths).tolist():
            chosen = (self.lengths == length).nonzero()[:, 0]
            self.module.inv_freq, self.module.attention_scaling = self.frequencies(length, x.device)
            parts.append(self.plain(self.module, x, position_ids[:, chosen]))
            order.append(chosen)
        back = torch.cat(order).argsort()
        cosines, sines = (torch.cat(tensors, 1)[:, back] for tensors in zip(*parts, strict=True))
        return cosines, sines

    def frequencies(self, length: int, device: torch.device) -> tuple[torch.Tensor, float]:
        """Those of a sequence of `length` tokens, and what cosines and sines are scaled with."""
        if length not in self.known:
            self.known[length] = ROPE_INIT_FUNCTIONS[self.module.rope_type](self.module.config, device, seq_len=length)
        return self.known[length]


def outgrown_at(model: Any) -> int | None:
    """The length beyond which the model's own generation computes every K anew (Phi-3), if it does."""
    config = next((module.config for module in model.modules() if getattr(module, "rope_type", None) == "longrope"), None)
    if config is None or "config.original_max_position_embeddings" not in inspect.getsource(type(model).prepare_inputs_for_generation):
        return None
    return int(config.original_max_position_embeddings)


def by_length(model: Any) -> list[Rope]:
    """Takes over the rotary modules of a model that need it."""
    return [Rope(module) for module in model.modules() if getattr(module, "rope_type", None) in ("dynamic", "longrope")]
