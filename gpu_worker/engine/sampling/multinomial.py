"""Scores to a token: one uniform number a row, inverse transform.

Probabilities are summed as integers. Integers have the same sum in every order: so a choice depends on its
own row and number alone, whatever shares the batch, on every device.
"""

from typing import NamedTuple

import torch

from gpu_worker.engine.sampling.top_k import top_k

ONE = 2.0**40  # 2**23 tokens as likely as the likeliest fit into an int64


class SamplerOutput(NamedTuple):
    """ids int64 [rows], logprobs float32 [rows]; of the likeliest tokens top_ids int64 [rows, n],
    top_logprobs float32 [rows, n].
    """

    ids: torch.Tensor
    logprobs: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor


def empty_output(num_rows: int, num_tops: int, device: torch.device) -> SamplerOutput:
    """The likeliest tokens lie one place after the other, in each all rows."""
    ids, logprobs = (
        torch.zeros(1 + num_tops, num_rows, dtype=dtype, device=device)
        for dtype in (torch.int64, torch.float32)
    )
    return SamplerOutput(ids[0], logprobs[0], ids[1:].T, logprobs[1:].T)


def to_weights(scores: torch.Tensor) -> torch.Tensor:
    """Scores, the likeliest of a row at 0 → their weights as int64: `exp(scores)` in units of 2**-40."""
    return scores.exp().mul_(ONE).long()


def log_of_weights(weights: torch.Tensor) -> torch.Tensor:
    return weights.double().div_(ONE).log_().float()


def pick(mass: torch.Tensor, totals: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Which candidates: int64 [rows, 1].

    mass int64 [rows, n]: sums of the weights up to each candidate; totals int64 [rows, 1]: up to the last
    that may be drawn; numbers float64 [rows, 1] in [0, 1).
    """
    return torch.searchsorted(mass, target_weight(numbers, totals), right=True).clamp_(
        max=mass.shape[1] - 1
    )  # no index is right where scores are not numbers


def target_weight(numbers: torch.Tensor, totals: torch.Tensor) -> torch.Tensor:
    """How much weight lies before what is drawn, at least, int64 [rows, 1]."""
    return torch.minimum((numbers * totals).long(), totals - 1)


def multinomial_sample(scores: torch.Tensor, numbers: torch.Tensor, num_tops: int) -> SamplerOutput:
    """One of all tokens: nothing needs to be sorted."""
    mass = to_weights(scores).cumsum(-1)
    totals = mass[:, -1:]
    return make_output(scores, totals, pick(mass, totals, numbers), num_tops)


def make_output(
    scores: torch.Tensor, totals: torch.Tensor, ids: torch.Tensor, num_tops: int
) -> SamplerOutput:
    """ids int64 [rows, 1] and the likeliest, with their log-probabilities; totals int64 [rows, 1] are the
    sums of the rows' weights.
    """
    top_scores, top_ids = top_k(scores, num_tops)
    total = log_of_weights(totals)
    return SamplerOutput(ids[:, 0], (scores.gather(1, ids) - total)[:, 0], top_ids, top_scores - total)
