"""The likeliest tokens of a row, in order; the lower id first where two are equally likely."""

import torch


def likeliest(scores: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """scores float32 [rows, vocabulary] → scores and ids int64 of the `width` likeliest, [rows, width]."""
    values, ids = torch.sort(scores, dim=-1, descending=True, stable=True)
    return values[:, :width].contiguous(), ids[:, :width]
