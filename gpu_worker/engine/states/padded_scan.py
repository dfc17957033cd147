"""Padded scans: rows of different lengths in one call of a mixer, each padded at its end to the longest.

Outputs never depend on later tokens. A row's state must be that of its last own token, so a scan gets steps
of length zero beyond it: nothing decays, and nothing is added.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gpu_worker.engine.states.selective_scan import SCAN

STILL = {"dt": -torch.inf, "g": 0.0, "beta": 0.0}
"""Arguments of scans, and what they are where a state stays as it is: `dt` is before softplus."""
SCANS = ({"dt", "A", "B", "C"}, {"g", "beta", "initial_state"})
"""Arguments by which a scan is known: of a state-space model, or of a delta rule."""

LEAST_CHUNK = 16
"""torch's scans compute whole chunks of tokens, of 64 or 256; on a CPU few tokens get a shorter one."""


class Padding:
    """Which tokens of the mixer that runs are padding.

    Attributes:
        mask: bool [rows, tokens]; None if none is.
        num_scans: scans that have heeded it.
    """

    mask: torch.Tensor | None = None
    num_scans = 0


@contextmanager
def padding(mask: torch.Tensor | None) -> Iterator[None]:
    """Have scans heed a mask, bool [rows, tokens]; None: no token is padding."""
    Padding.mask, Padding.num_scans = mask, 0
    try:
        yield
    finally:
        Padding.mask = None


def heed_padding(mixer: Any) -> None:
    """Give a mixer scans that leave states alone where tokens are padding."""
    modeling = sys.modules[type(mixer).__module__]
    for name, scan in list(vars(modeling).items()):
        if inspect.isfunction(scan) and is_scan(scan) and not hasattr(scan, "heeds_padding"):
            setattr(modeling, name, heeding(scan, token_dim=-1 if name == SCAN else 1))


def is_scan(function: Callable[..., Any]) -> bool:
    """Whether a function computes many tokens from a state: has the arguments of a scan, and returns states
    on demand.
    """
    names = inspect.signature(function).parameters.keys()
    returns = any(name.startswith(("return_", "output_final")) for name in names)
    return returns and any(own <= names for own in SCANS)


def heeding(scan: Callable[..., Any], token_dim: int) -> Callable[..., Any]:
    """A scan that heeds `Padding`, and on a CPU computes no more than its tokens need. Its arguments have
    tokens in `token_dim`.
    """
    signature = inspect.signature(scan)
    has_chunks = "chunk_size" in signature.parameters

    @functools.wraps(scan)
    def scan_on(*arguments: Any, **options: Any) -> Any:
        if Padding.mask is None and not has_chunks:
            return scan(*arguments, **options)
        named = signature.bind(*arguments, **options).arguments
        rest = named.pop("kwargs", {})
        steps = named["dt" if "dt" in named else "g"]
        if has_chunks and steps.device.type == "cpu":
            longest = named.get("chunk_size", signature.parameters["chunk_size"].default)
            named["chunk_size"] = min(longest, max(LEAST_CHUNK, power_above(steps.shape[token_dim])))
        for name in STILL.keys() & named.keys() if Padding.mask is not None else ():
            named[name] = filled(named[name], token_dim, STILL[name])
        Padding.num_scans += 1
        return scan(**named, **rest)

    scan_on.heeds_padding = True  # type: ignore[attr-defined]
    return scan_on


def power_above(count: int) -> int:
    """The least power of two that is not below a positive number."""
    return 1 << (count - 1).bit_length()


def filled(tensor: torch.Tensor, token_dim: int, value: float) -> torch.Tensor:
    """tensor [rows, …] of any dtype with tokens in `token_dim` → a copy with `value` at padding"""
    assert Padding.mask is not None
    shape = [1] * tensor.dim()
    shape[0], shape[token_dim] = Padding.mask.shape
    return tensor.masked_fill(Padding.mask.view(shape), value)
