"""Hidden states: what a model's modules get in a forward, kept for what drafts from it."""

from collections.abc import Sequence
from typing import Any

import torch


class HiddenStates:
    """Records the input of modules in each forward.

    In a captured graph a hook runs only while it is captured: so on CUDA the states are copied to a place
    that stays, which the graph writes again whenever it is replayed.
    """

    def __init__(self, modules: Sequence[Any], max_tokens: int, device: torch.device) -> None:
        self.max_tokens = max_tokens
        self.device = device
        self.recorded: list[torch.Tensor] = [torch.empty(0)] * len(modules)
        for number, module in enumerate(modules):
            module.register_forward_pre_hook(self.hook_of(number), with_kwargs=True)

    def hook_of(self, number: int) -> Any:
        def record(module: Any, arguments: Any, options: Any) -> None:
            states = arguments[0] if arguments else options["hidden_states"]
            self.record(number, states.reshape(-1, states.shape[-1]))

        return record

    def record(self, number: int, states: torch.Tensor) -> None:
        """Keep states [tokens, hidden] of any dtype."""
        if self.device.type != "cuda":
            self.recorded[number] = states
            return
        if len(self.recorded[number]) < self.max_tokens:
            self.recorded[number] = states.new_zeros(self.max_tokens, states.shape[1])
        self.recorded[number][: len(states)].copy_(states[: self.max_tokens])

    def newest(self, num_tokens: int) -> torch.Tensor:
        """Those of the last forward, of the model's dtype: [num_tokens, hidden of all modules]."""
        parts = [states[:num_tokens] for states in self.recorded]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)
