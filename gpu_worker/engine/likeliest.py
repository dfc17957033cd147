"""The likeliest tokens of a row, in order; the lower id first where two are equally likely."""

import numpy as np
import numpy.typing as npt
import torch

WIDTH = 1024  # tokens of a first look


def widths(scores: torch.Tensor) -> list[int]:
    """How many to look at first, and next in rows where these do not suffice. On a device all at once: to find out which rows need more,
    the host would have to wait."""
    size = scores.shape[1]
    return [WIDTH, size] if scores.device.type == "cpu" and size > WIDTH else [size]


def likeliest(scores: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """scores float32 [rows, vocabulary] → scores and ids int64 of the `width` likeliest, [rows, width]; of all where there are fewer."""
    if scores.device.type == "cpu":
        ids = torch.from_numpy(selected(scores.numpy(), width))
        return scores.gather(1, ids), ids
    values, ids = torch.sort(scores, dim=-1, descending=True, stable=True)
    return values[:, :width], ids[:, :width]


def selected(scores: npt.NDArray[np.float32], width: int) -> npt.NDArray[np.int64]:
    """Ids in order. numpy selects and sorts integers ten times faster than torch does floats; so a key has the bits of the score, made to
    rise with it, above the id."""
    bits = scores.view(np.int32)
    keys = (bits ^ (bits >> 31 & 0x7FFFFFFF)).astype(np.int64)
    keys <<= 32
    keys -= np.arange(scores.shape[1])
    if width < scores.shape[1]:
        keys.partition(scores.shape[1] - width, axis=-1)
        keys = keys[:, -width:]
    keys.sort(axis=-1)
    return np.ascontiguousarray(-keys[:, ::-1] & 0xFFFFFFFF)
