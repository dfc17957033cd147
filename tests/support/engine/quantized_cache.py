"""What transformers generates where its KV cache holds 8-bit floats: the ids that the engine must equal."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

Scales = Mapping[int, tuple[float, float]]
"""By layer: of K and of V."""


class QuantizedCache(DynamicCache):
    """K and V as the nearest 8-bit floats, divided by their layer's scales (default: 1)."""

    def __init__(self, config: Any, dtype: torch.dtype, scales: Scales) -> None:
        super().__init__(config=config)
        self.dtype = dtype
        self.scales = scales

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *rest: Any, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[1, kv_heads, tokens, dim] float32 → what the cache has of all tokens"""
        scales = self.scales.get(layer_idx, (1.0, 1.0))
        rounded = (self.rounded(key_states, scales[0]), self.rounded(value_states, scales[1]))
        return super().update(*rounded, layer_idx, *rest, **options)

    def rounded(self, numbers: torch.Tensor, scale: float) -> torch.Tensor:
        largest = torch.finfo(self.dtype).max
        return (numbers / scale).clamp(-largest, largest).to(self.dtype).float() * scale


@torch.inference_mode()
def quantized_ids(
    folder: Path, prompt: list[int], count: int, dtype: torch.dtype, scales: Scales
) -> tuple[list[int], torch.Tensor]:
    """Greedy, float32 → so many new ids, and the logits [vocabulary] of the first."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    cache, ids, found = QuantizedCache(model.config, dtype, scales), prompt, []
    first = None
    for _ in range(count):
        logits = model(torch.tensor([ids]), past_key_values=cache).logits[0, -1]
        first = logits if first is None else first
        ids = [int(logits.argmax())]
        found += ids
    assert first is not None
    return found, first
