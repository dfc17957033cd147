"""The likeliest tokens of a row, in order; the lower id first where two are equally likely."""

import numpy as np
import numpy.typing as npt
import torch

WIDTHS = (1024, 8192)  # tokens of a first look, and of a second


def widths(scores: torch.Tensor) -> list[int]:
    """How many to look at, one look after the other, in rows where fewer did not suffice. On a device all at once: to find out which rows
    need more, the host would have to wait."""
    size = scores.shape[1]
    return [*(width for width in WIDTHS if width < size and scores.device.type == "cpu"), size]


def likeliest(scores: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """scores float32 [rows, vocabulary], none above 0 → scores and ids int64 of the `width` likeliest, [rows, width]."""
    if scores.device.type == "cpu":
        ids = torch.from_numpy(selected(scores.numpy(), width))
        return scores.gather(1, ids), ids
    values, ids = torch.sort(scores, dim=-1, descending=True, stable=True)
    return values[:, :width].contiguous(), ids[:, :width]


def selected(scores: npt.NDArray[np.float32], width: int) -> npt.NDArray[np.int64]:
    """Ids in order. numpy selects and sorts integers ten times faster than torch does floats, so a key has the score's bits without the
    sign, which fall as the score rises, above the id."""
    keys = (scores.view(np.int32) & 0x7FFFFFFF).astype(np.int64)
    keys <<= 32
    keys |= np.arange(scores.shape[1])
    if width < scores.shape[1]:
        keys.partition(width - 1, axis=-1)
        keys = np.ascontiguousarray(keys[:, :width])
    keys.sort(axis=-1)
    keys &= 0xFFFFFFFF
    return keys
