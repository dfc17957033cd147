"""Scans of mixers that go on from earlier states: padded, selective, and after one more token.

Rows of different lengths are one call of a mixer, each padded at its end to the longest. Outputs never depend
on later tokens. A row's state must be that of its last own token, so a scan gets steps of length zero beyond
it: nothing decays, and nothing is added.

Mamba 1's scan in transformers begins with zeros, so a chunk of a prompt would forget the chunks before it.
The scan is linear in its state: what a first state adds to each output is computed apart, with the decay up
to that token. So this holds for torch's scan and for mamba-ssm's kernel.

After one more token of each row transformers' code passes over the states of Mamba 2 and of gated delta rules
up to fifteen times, and makes new ones of their size. On a CPU they are changed in place, in three or four
passes. GPUs have kernels for that (mamba-ssm, flash-linear-attention).
"""

import functools
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

STILL = {"dt": -torch.inf, "g": 0.0, "beta": 0.0}
"""Arguments of scans, and what they are where a state stays as it is: `dt` is before softplus."""
SCANS = ({"dt", "A", "B", "C"}, {"g", "beta", "initial_state"})
"""Arguments by which a scan is known: of a state-space model, or of a delta rule."""

LEAST_CHUNK = 16
"""torch's scans compute whole chunks of tokens, of 64 or 256; on a CPU few tokens get a shorter one."""


def with_scans(forward: Any, rows: Any) -> Callable[..., Any]:
    """A mixer's forward in transformers, in which these states of rows (`RowStates`) reach the scans and
    updates: functions of its module, which have no argument for them.
    """
    own = {name: functools.partial(scan, rows) for name, scan in scans_of(forward).items()}
    bound = FunctionType(
        forward.__code__, forward.__globals__ | own, argdefs=forward.__defaults__, closure=forward.__closure__
    )
    bound.__kwdefaults__ = forward.__kwdefaults__
    return bound


@functools.cache
def scans_of(forward: Any) -> dict[str, Callable[..., Any]]:
    """What stands for functions that a mixer's forward names; each takes the states of rows first. Scans
    leave states alone where tokens are padding and, of Mamba 1, go on from the states of rows.
    """
    found: dict[str, Callable[..., Any]] = {}
    for name in forward.__code__.co_names:
        own = forward.__globals__.get(name)
        if name in UPDATES and own:
            found[name] = functools.partial(UPDATES[name], own)
        elif inspect.isfunction(own) and (name == SCAN or is_scan(own)):
            found[name] = heeding(own, goes_on=name == SCAN)
    return found


def is_scan(function: Callable[..., Any]) -> bool:
    """Whether a function computes many tokens from a state: has the arguments of a scan, and returns states
    on demand.
    """
    names = inspect.signature(function).parameters.keys()
    returns = any(name.startswith(("return_", "output_final")) for name in names)
    return returns and any(own <= names for own in SCANS)


def heeding(own: Callable[..., Any], goes_on: bool) -> Callable[..., Any]:
    """A scan that heeds the padding of rows, and on a CPU computes no more than its tokens need. One that
    `goes_on` (Mamba 1's) is `continued`, and has tokens in the last dimension of its arguments, others in the
    second.
    """
    signature, token_dim = inspect.signature(own), -1 if goes_on else 1
    has_chunks = "chunk_size" in signature.parameters

    def scan_on(rows: Any, *arguments: Any, **options: Any) -> Any:
        padded, scan = rows.padded, functools.partial(continued, own, rows) if goes_on else own
        if padded is None and not has_chunks:
            return scan(*arguments, **options)
        named = signature.bind(*arguments, **options).arguments
        rest = named.pop("kwargs", {})
        steps = named["dt" if "dt" in named else "g"]
        if has_chunks and steps.device.type == "cpu":
            longest = named.get("chunk_size", signature.parameters["chunk_size"].default)
            enough = 1 << (steps.shape[token_dim] - 1).bit_length()  # a power of two
            named["chunk_size"] = min(longest, max(LEAST_CHUNK, enough))
        if padded is not None:
            for name in STILL.keys() & named.keys():
                shape = [1] * named[name].dim()
                shape[0], shape[token_dim] = padded.shape
                named[name] = named[name].masked_fill(padded.view(shape), STILL[name])
        rows.num_scans += 1
        return scan(**named, **rest)

    return scan_on


SCAN = "mamba_selective_scan"
TOKENS = 128
"""How many are computed at a time: each needs memory as a whole state does."""


def continued(
    scan: Callable[..., Any],
    rows: Any,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
    **options: Any,
) -> Any:
    """A scan that begins with the next of the first states of the rows. hidden_states, dt and z [rows,
    channels, tokens], A [channels, size], B and C [rows, size, tokens], D and delta_bias [channels] → outputs
    [rows, channels, tokens], with `return_last_state` the last state [rows, channels, size], too.
    """
    options |= {"D": D, "z": z, "delta_bias": delta_bias, "delta_softplus": delta_softplus}
    result = scan(hidden_states, dt, A, B, C, **options)
    first = next(rows.first, None)
    if first is None:
        return result
    steps = dt.float() if delta_bias is None else dt.float() + delta_bias.float()[:, None]
    steps = torch.nn.functional.softplus(steps) if delta_softplus else steps
    added, left = carried(first.float(), steps.cumsum(-1), A.float(), C.float())
    added = added if z is None else added * torch.nn.functional.silu(z.float())
    outputs, last = result if isinstance(result, tuple) else (result, None)
    outputs = outputs + added.to(outputs.dtype)
    return outputs if last is None else (outputs, last + left.to(last.dtype))


def carried(
    first: torch.Tensor, steps: torch.Tensor, A: torch.Tensor, C: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a first state adds to each output, and what is left of it after the last token: [rows, channels,
    tokens] and [rows, channels, size]. All float32: first [rows, channels, size], steps [rows, channels,
    tokens] summed up to each token, A [channels, size], C [rows, size, tokens].
    """
    added = []
    for part, outputs in zip(torch.split(steps, TOKENS, -1), torch.split(C, TOKENS, -1), strict=True):
        left = torch.exp(part[..., None] * A[:, None]) * first[:, :, None]
        added.append(torch.einsum("bcts,bst->bct", left, outputs))
    return torch.cat(added, -1), left[:, :, -1]


EPSILON = 1e-6
"""Of the lengths of queries and keys, as in transformers."""


def update_scan(
    own: Callable[..., Any],
    rows: Any,
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
    """Mamba 2's update. It leaves to `own` what it does not know: GPUs, states of other dtypes, and decays
    that differ within a head.

    Change `state` float32 [rows, heads, width, size] → outputs [rows, heads, width] of the dtype of
    `hidden_states`, which have that shape, as dt has; A [heads, width, size], B and C [rows, groups,
    size], D and dt_bias [heads, width].
    """
    if not (is_plain(state) and is_repeated(dt) and is_repeated(A) and is_repeated(A[..., 0])):
        options = {"dt_bias": dt_bias, "dt_softplus": dt_softplus, "z": z}
        return own(state, hidden_states, dt, A, B, C, D, **options, **rest)  # type: ignore[no-any-return]
    steps = dt[..., 0] if dt_bias is None else dt[..., 0] + dt_bias[..., 0].to(dt.dtype)
    steps = (torch.nn.functional.softplus(steps) if dt_softplus else steps).float()
    state.mul_(torch.exp(steps * A[..., 0, 0].float())[..., None, None])
    num_rows, groups, size = B.shape
    grouped = state.view(num_rows, groups, -1, size)
    inputs = (hidden_states.float() * steps[..., None]).view(num_rows, groups, -1, 1)
    grouped.addcmul_(inputs, B.float()[:, :, None])
    output = (grouped @ C.float()[..., None]).view(hidden_states.shape)
    output = output if D is None else output + hidden_states * D
    output = output if z is None else output * torch.nn.functional.silu(z)
    return output.to(hidden_states.dtype)


def update_delta_rule(
    own: Callable[..., Any],
    rows: Any,
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
    """The gated delta rule's update. It leaves to `own` what it does not know: GPUs, states of other dtypes,
    and more than one token.

    Change `initial_state` float32 [rows, heads, width, size] → outputs [rows, 1, heads, size] of the
    dtype of `query`, and the state. query and key [rows, 1, heads or a part of them, width], value [rows,
    1, heads, size], g and beta [rows, 1, heads].
    """
    if initial_state is None or not is_plain(initial_state) or value.shape[1] != 1:
        options = {"initial_state": initial_state, "output_final_state": output_final_state}
        options["use_qk_l2norm_in_kernel"] = use_qk_l2norm_in_kernel
        return own(query, key, value, g=g, beta=beta, **options, **rest)  # type: ignore[no-any-return]
    num_rows, heads, width, size = initial_state.shape
    queries, keys = (
        of_heads(one, heads, use_qk_l2norm_in_kernel).view(num_rows * heads, 1, width) for one in (query, key)
    )
    initial_state.mul_(g.float().exp().view(num_rows, heads, 1, 1))
    state = initial_state.view(num_rows * heads, width, size)
    rates = beta.float().view(num_rows * heads, 1, 1)
    missing = (value.float().reshape(num_rows * heads, 1, size) - keys @ state) * rates
    state.addcmul_(keys.transpose(1, 2), missing)
    output = (queries @ state).view(num_rows, 1, heads, size) * width**-0.5
    return output.to(query.dtype), initial_state if output_final_state else None


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


UPDATES: dict[str, Callable[..., Any]] = {
    "mamba2_selective_state_update": update_scan,
    "torch_recurrent_gated_delta_rule": update_delta_rule,
}
