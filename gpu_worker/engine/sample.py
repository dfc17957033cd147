"""Logits to tokens."""

import torch


def greedy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [samples, vocabulary] → ids int64 [samples], natural logarithms of their probabilities float32 [samples]."""
    best, ids = logits.max(-1)
    below = logits.to(torch.float32, copy=True).sub_(best.float()[:, None])  # in place: another buffer of this size costs page faults
    return ids, below.exp_().sum(-1).log_().neg_()
