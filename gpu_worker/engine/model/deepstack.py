"""DeepStack: embeddings of pictures that are added to the hidden states after the first layers, too
(arXiv:2406.04334).
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from gpu_worker.engine.batch.inputs import PlacedEmbeddings


class DeepStack:
    """Adds to the hidden states after each of some layers.

    Attributes:
        added: of the step that runs: the embeddings for the model's input, then those for each of the layers,
            beside each other: [tokens, hidden * (1 + layers)] of the model's dtype.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.added: Sequence[PlacedEmbeddings] = ()
        for number, layer in enumerate(layers, 1):
            layer.register_forward_hook(partial(self.add, number))

    def add(self, number: int, layer: Any, arguments: Any, states: torch.Tensor) -> None:
        """Add to the states [1, tokens, hidden] that a layer returns, in place."""
        hidden = states.shape[2]
        for places, values in self.added:
            states[0, places] += values[:, number * hidden : (number + 1) * hidden]
