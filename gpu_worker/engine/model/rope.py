"""Rotary embeddings whose frequencies depend on the length of a sequence, for steps with tokens of many
sequences.

transformers computes frequencies once a forward, from the largest position. Here each token keeps the
frequencies that it would have alone: those for the length at which its K was first computed, the prompt's or
its own. Some models compute every K anew once a sequence outgrows its first frequencies.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

BY_LENGTH = ("dynamic", "longrope")
CosSin = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines, each [1, tokens, dim] of the module's dtype."""


class PerTokenRope:
    """Replaces the forward of one rotary module of type `dynamic` (NTK) or `longrope` (arXiv:2402.13753).
    Some modules have a type of their own for each type of layer: then only those that need it are computed
    here.

    Tensors: states x [1, tokens, hidden] of the model's dtype, position_ids int64 [1, tokens]; Qwen3.5 gives
    them three times, [3, 1, tokens], for axes of pictures, which it is not shown.

    Attributes:
        lengths: int64 [tokens], as in batch/inputs.py; set before each forward.
    """

    def __init__(self, module: Any) -> None:
        self.module = module
        self.plain_forward = inspect.unwrap(type(module).forward)
        self.types = {layer_type: kind for layer_type, kind in types_of(module).items() if kind in BY_LENGTH}
        self.lengths = torch.ones(1, dtype=torch.int64)
        self.is_complex = False
        self.frequencies: dict[tuple[str | None, int], tuple[torch.Tensor, float]] = {}
        module.forward = self.forward

    @property
    def needs_host_lengths(self) -> bool:
        """Whether the host must know the lengths: `dynamic` has frequencies for each length, `longrope` has
        two sets.
        """
        return "dynamic" in self.types.values()

    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None
    ) -> CosSin | torch.Tensor:
        """→ cosines and sines, each [1, tokens, dim] of the module's dtype; complex numbers [1, tokens, dim]
        where the module gives these (DeepSeek-V2)
        """
        position_ids = position_ids[0] if position_ids.dim() == 3 else position_ids
        kind = self.types.get(layer_type)
        if kind is None:
            return self.plain_forward(self.module, x, position_ids, **options_of(layer_type))  # type: ignore[no-any-return]
        cos_sin = (self.rotate_by_length if kind == "dynamic" else self.rotate_by_side)(
            x, position_ids, layer_type
        )
        return torch.complex(*cos_sin) if self.is_complex else cos_sin

    def rotate_by_length(self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None) -> CosSin:
        """The tokens of each length that has frequencies of its own, one after the other."""
        lengths, parts, order = self.lengths.clamp(min=self.module.config.max_position_embeddings), [], []
        for length in torch.unique(lengths).tolist():
            chosen = (lengths == length).nonzero()[:, 0]
            parts.append(self.cos_sin(x, position_ids[:, chosen], layer_type, length))
            order.append(chosen)
        back = torch.cat(order).argsort()
        cosines, sines = (torch.cat(tensors, 1)[:, back] for tensors in zip(*parts, strict=True))
        return cosines, sines

    def rotate_by_side(self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None) -> CosSin:
        """Compute all tokens with both sets of frequencies, and choose for each: this does not wait for the
        device.
        """
        config = self.module.config
        parameters = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
        original = parameters["original_max_position_embeddings"]
        short = self.cos_sin(x, position_ids.clamp(max=original - 1), layer_type, original)
        long = self.cos_sin(x, position_ids, layer_type, original + 1)
        outgrown = (self.lengths > original)[None, :, None]
        return torch.where(outgrown, long[0], short[0]), torch.where(outgrown, long[1], short[1])

    def cos_sin(
        self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None, length: int
    ) -> CosSin:
        """Cosines and sines with the frequencies of a sequence of `length` tokens, which has all of these
        positions.
        """
        self.set_frequencies(layer_type, length, x.device)
        last = position_ids.new_full((1, 1), length - 1)  # Phi-MoE scales by the largest position given
        output = self.plain_forward(
            self.module, x, torch.cat((position_ids, last), 1), **options_of(layer_type)
        )
        self.is_complex = torch.is_tensor(output)
        cosines, sines = (output.real, output.imag) if self.is_complex else output
        return cosines[:, :-1], sines[:, :-1]

    def set_frequencies(self, layer_type: str | None, length: int, device: torch.device) -> None:
        """Give the module the frequencies of a sequence of `length` tokens, and what it scales cosines and
        sines with.
        """
        key, side = (layer_type, length), "" if layer_type is None else f"{layer_type}_"
        if key not in self.frequencies:
            compute = ROPE_INIT_FUNCTIONS[self.types[layer_type]]
            self.frequencies[key] = compute(self.module.config, device, seq_len=length, layer_type=layer_type)
        frequencies, scaling = self.frequencies[key]
        setattr(self.module, f"{side}inv_freq", frequencies)
        setattr(self.module, f"{side}attention_scaling", scaling)


class AxisRope:
    """Replaces the forward of a rotary module of a model whose tokens have a position in time, height and
    width (M-RoPE, arXiv:2409.12191). Without pictures all three are one number.

    Tensors: states x [1, tokens, hidden] of the model's dtype, position_ids int64 [1, tokens].

    Attributes:
        axes: int64 [dim]; which of the three turns each number of a head.
        positions: int64 [3, tokens] of the step that runs; None if it has no row with pictures.
    """

    def __init__(self, module: Any, axes: Sequence[int]) -> None:
        self.module = module
        self.plain_forward = inspect.unwrap(type(module).forward)
        self.axes = torch.tensor([*axes, *axes], device=module.inv_freq.device)
        self.positions: torch.Tensor | None = None
        module.forward = self.forward

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> CosSin:
        """→ cosines and sines, each [1, tokens, dim] of the module's dtype"""
        if self.positions is None:
            return self.plain_forward(self.module, x, position_ids)  # type: ignore[no-any-return]
        cosines, sines = self.plain_forward(self.module, x, self.positions)
        chosen = self.axes.expand(1, *cosines.shape[1:])
        return cosines.gather(0, chosen), sines.gather(0, chosen)


def options_of(layer_type: str | None) -> dict[str, str]:
    return {} if layer_type is None else {"layer_type": layer_type}


def types_of(module: Any) -> dict[str | None, str]:
    """The types of a rotary module, by the type of layer where it has one for each; none of other modules."""
    kind = getattr(module, "rope_type", None)
    return kind if isinstance(kind, dict) else {None: kind} if kind else {}


def recompute_length(model: Any) -> int | None:
    """The length beyond which the model's own generation computes every K anew (Phi-3), if it does."""
    config = next(
        (module.config for module in model.modules() if "longrope" in types_of(module).values()), None
    )
    if config is None or "config.original_max_position_embeddings" not in inspect.getsource(
        type(model).prepare_inputs_for_generation
    ):
        return None
    return int(config.original_max_position_embeddings)
