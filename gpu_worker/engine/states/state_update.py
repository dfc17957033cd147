"""State updates: the states of Mamba 2 and of gated delta rules after one more token of each row, on a CPU.

transformers' own code passes over states up to fifteen times, and makes new ones of their size. These change
the states in place, in three or four passes. GPUs have kernels for that (mamba-ssm, flash-linear-attention).
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

EPSILON = 1e-6
"""Of the lengths of queries and keys, as in transformers."""


def update_in_place(mixer: Any) -> None:
    """Give a mixer the updates of this module, where transformers has ones of these names."""
    modeling = sys.modules[type(mixer).__module__]
    for name, updating in UPDATES.items():
        own = getattr(modeling, name, None)
        if own is not None and not hasattr(own, "is_in_place"):
            update = functools.wraps(own)(updating(own))
            update.is_in_place = True  # type: ignore[attr-defined]
            setattr(modeling, name, update)


def updating_scan(own: Callable[..., Any]) -> Callable[..., Any]:
    """Mamba 2's update. It leaves to `own` what it does not know: GPUs, states of other dtypes, and decays
    that differ within a head.
    """

    def update(
        state: torch.Tensor,
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        D: torch.Tensor | None = None,
        dt_bias: torch.Tensor | None = None,
        dt_softplus: bool = False,
        z: torch.Tensor | None = None,
        **rest: Any,
    ) -> torch.Tensor:
        """Change `state` float32 [rows, heads, width, size] → outputs [rows, heads, width] of the dtype of
        `hidden_states`, which have that shape, as dt has; A [heads, width, size], B and C [rows, groups,
        size], D and dt_bias [heads, width].
        """
        if not (is_plain(state) and is_repeated(dt) and is_repeated(A) and is_repeated(A[..., 0])):
            options = {"dt_bias": dt_bias, "dt_softplus": dt_softplus, "z": z}
            return own(state, hidden_states, dt, A, B, C, D, **options, **rest)  # type: ignore[no-any-return]
        steps = dt[..., 0] if dt_bias is None else dt[..., 0] + dt_bias[..., 0].to(dt.dtype)
        steps = (torch.nn.functional.softplus(steps) if dt_softplus else steps).float()
        state.mul_(torch.exp(steps * A[..., 0, 0].float())[..., None, None])
        rows, groups, size = B.shape
        grouped = state.view(rows, groups, -1, size)
        inputs = (hidden_states.float() * steps[..., None]).view(rows, groups, -1, 1)
        grouped.addcmul_(inputs, B.float()[:, :, None])
        output = (grouped @ C.float()[..., None]).view(hidden_states.shape)
        output = output if D is None else output + hidden_states * D
        output = output if z is None else output * torch.nn.functional.silu(z)
        return output.to(hidden_states.dtype)

    return update


def updating_delta_rule(own: Callable[..., Any]) -> Callable[..., Any]:
    """The gated delta rule's update. It leaves to `own` what it does not know: GPUs, states of other dtypes,
    and more than one token.
    """

    def update(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        initial_state: torch.Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **rest: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Change `initial_state` float32 [rows, heads, width, size] → outputs [rows, 1, heads, size] of the
        dtype of `query`, and the state. query and key [rows, 1, heads or a part of them, width], value [rows,
        1, heads, size], g and beta [rows, 1, heads].
        """
        if initial_state is None or not is_plain(initial_state) or value.shape[1] != 1:
            options = {"initial_state": initial_state, "output_final_state": output_final_state}
            options["use_qk_l2norm_in_kernel"] = use_qk_l2norm_in_kernel
            return own(query, key, value, g=g, beta=beta, **options, **rest)  # type: ignore[no-any-return]
        rows, heads, width, size = initial_state.shape
        queries, keys = (
            of_heads(one, heads, use_qk_l2norm_in_kernel).view(rows * heads, 1, width) for one in (query, key)
        )
        initial_state.mul_(g.float().exp().view(rows, heads, 1, 1))
        state = initial_state.view(rows * heads, width, size)
        rates = beta.float().view(rows * heads, 1, 1)
        missing = (value.float().reshape(rows * heads, 1, size) - keys @ state) * rates
        state.addcmul_(keys.transpose(1, 2), missing)
        output = (queries @ state).view(rows, 1, heads, size) * width**-0.5
        return output.to(query.dtype), initial_state if output_final_state else None

    return update


def of_heads(vectors: torch.Tensor, heads: int, has_length_one: bool) -> torch.Tensor:
    """vectors [rows, 1, some heads, width] of any dtype → float32 [rows, 1, heads, width], of length one if
    `has_length_one`
    """
    vectors = vectors.float()
    if has_length_one:
        vectors = vectors * torch.rsqrt(vectors.square().sum(-1, keepdim=True) + EPSILON)
    return vectors.repeat_interleave(heads // vectors.shape[2], 2)


def is_plain(state: torch.Tensor) -> bool:
    """Whether a state [...] of any dtype is float32, in one piece, on a CPU."""
    return state.dtype == torch.float32 and state.device.type == "cpu" and state.is_contiguous()


def is_repeated(tensor: torch.Tensor) -> bool:
    """Whether all numbers along the last dimension of a tensor [...] of any dtype are one in memory."""
    return tensor.shape[-1] == 1 or tensor.stride(-1) == 0


UPDATES = {
    "mamba2_selective_state_update": updating_scan,
    "torch_recurrent_gated_delta_rule": updating_delta_rule,
}
