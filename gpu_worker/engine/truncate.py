"""Rows that choose among a part of the vocabulary: top-k, top-p, min-p, typical-p."""

from typing import NamedTuple

import torch

from gpu_worker.engine.draw import ONE, Drawn, drawn, fixed, from_all, log
from gpu_worker.engine.likeliest import likeliest

OUT = float("-inf")


class Limits(NamedTuple):
    """Tensors [rows, 1]: how much each row keeps, and its random number. top_k 0, top_p 1, min_p 0 and typical_p 1 keep all."""

    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    typical_p: torch.Tensor
    numbers: torch.Tensor


def narrowly(scores: torch.Tensor, limits: Limits, num_tops: int) -> Drawn:
    """Without typical-p: the likeliest, in their order."""
    values, ids = likeliest(scores, scores.shape[1])
    mass, kept = prefix(values, limits)
    totals = mass.gather(1, kept - 1)
    place, total = drawn(mass, totals, limits.numbers), log(totals)
    tops = values[:, :num_tops].masked_fill(beyond(num_tops, kept), OUT)
    return Drawn(ids.gather(1, place)[:, 0], (values.gather(1, place) - total)[:, 0], ids[:, :num_tops], tops - total)


def prefix(values: torch.Tensor, limits: Limits) -> tuple[torch.Tensor, torch.Tensor]:
    """values [rows, vocabulary] in order → int64 [rows, vocabulary], sums of their weights; int64 [rows, 1], how many each row keeps.

    Top-k keeps what is as likely as the last of k; top-p (arXiv:1904.09751) the fewest that have this share of what top-k left; min-p
    (arXiv:2407.01082) what has this share of the likeliest's probability.
    """
    width = values.shape[1]
    mass, rising = fixed(values).cumsum(-1), -values
    kth = rising.gather(1, limits.top_k.clamp(1, width) - 1)
    num_k = torch.where(limits.top_k > 0, torch.searchsorted(rising, kth, right=True), width)
    num_p = torch.searchsorted(mass, (limits.top_p * mass.gather(1, num_k - 1)).ceil().long()) + 1
    num_m = torch.searchsorted(rising, -limits.min_p.log().float(), right=True)
    return mass, torch.minimum(torch.minimum(num_k, num_m), torch.where(limits.top_p < 1, num_p, width)).clamp_(1, width)


def typically(scores: torch.Tensor, limits: Limits, num_tops: int) -> Drawn:
    """Typical-p, after the others."""
    values, ids = likeliest(scores, scores.shape[1])
    kept = prefix(values, limits)[1]
    scores = scores.scatter(1, ids, values.masked_fill_(beyond(values.shape[1], kept), OUT))
    return from_all(scores.masked_fill_(atypical(scores, limits.typical_p), OUT), limits.numbers, num_tops)


def atypical(scores: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """What locally typical sampling (arXiv:2202.00666) leaves out, bool [rows, vocabulary].

    It keeps the fewest tokens with that share whose information is nearest to the entropy, and what is as near as the last of them. The
    likeliest of a row is at 0: information and entropy both lack the logarithm of the total.
    """
    weights = fixed(scores)
    total = weights.sum(-1, keepdim=True)
    entropy = (scores.exp() * -scores * ONE).nan_to_num_(0).long().sum(-1, keepdim=True) / total
    nearness = -(scores + entropy).abs_().float()
    nearest, order = likeliest(nearness, scores.shape[1])
    last = torch.searchsorted(weights.gather(1, order).cumsum(-1), (share * total).ceil().long())
    return nearness < nearest.gather(1, last.clamp_(max=scores.shape[1] - 1))


def beyond(width: int, kept: torch.Tensor) -> torch.Tensor:
    return torch.arange(width, device=kept.device) >= kept
