"""Rows that choose among a part of the vocabulary: top-k, top-p, min-p, typical-p."""

from typing import NamedTuple

import torch

from gpu_worker.engine.draw import ONE, Drawn, drawn, fixed, log, told
from gpu_worker.engine.likeliest import likeliest, widths

OUT = float("-inf")


class Limits(NamedTuple):
    """Tensors [rows, 1]: how much each row keeps, and its random number. top_k 0, top_p 1, min_p 0 and typical_p 1 keep all."""

    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    typical_p: torch.Tensor
    numbers: torch.Tensor

    def of(self, rows: torch.Tensor) -> "Limits":
        return Limits(*(column[rows] for column in self))


class Prefix(NamedTuple):
    """Which of its likeliest tokens each row keeps: the first `kept`, int64 [rows, 1]; `mass` int64 [rows, n] sums their weights; `sure`
    bool [rows] where no more tokens need be looked at."""

    mass: torch.Tensor
    kept: torch.Tensor
    sure: torch.Tensor


def narrowly(scores: torch.Tensor, weights: torch.Tensor, limits: Limits, num_tops: int) -> Drawn:
    """Without typical-p: the likeliest few, so not all are sorted."""
    return within(scores, weights.sum(-1, keepdim=True), limits, num_tops, widths(scores))


def within(scores: torch.Tensor, totals: torch.Tensor, limits: Limits, num_tops: int, widths: list[int]) -> Drawn:
    """Looks at the first of `widths` likeliest tokens; goes on for the rows that need more."""
    values, ids = likeliest(scores, widths[0])
    found = prefix(values, totals, limits)
    chosen = pick(values, ids, found, limits.numbers, num_tops)
    if len(widths) > 1 and not found.sure.all():
        rows = (~found.sure).nonzero()[:, 0]
        wider = within(scores[rows], totals[rows], limits.of(rows), num_tops, widths[1:])
        for column, better in zip(chosen, wider, strict=True):
            column[rows] = better
    return chosen


def pick(values: torch.Tensor, ids: torch.Tensor, found: Prefix, numbers: torch.Tensor, num_tops: int) -> Drawn:
    totals = found.mass.gather(1, found.kept - 1)
    place, total = drawn(found.mass, totals, numbers), log(totals)
    tops = values[:, :num_tops].masked_fill(beyond(num_tops, found.kept), OUT)
    return Drawn(ids.gather(1, place)[:, 0], (values.gather(1, place) - total)[:, 0], ids[:, :num_tops], tops - total)


def prefix(values: torch.Tensor, totals: torch.Tensor, limits: Limits) -> Prefix:
    """values [rows, n]: the likeliest, in order.

    Top-k keeps what is as likely as the last of k; top-p (arXiv:1904.09751) the fewest that have this share of what top-k left; min-p
    (arXiv:2407.01082) what has this share of the likeliest's probability.
    """
    width = values.shape[1]
    mass, rising, by_k = fixed(values).cumsum(-1), -values, limits.top_k > 0
    kth = rising.gather(1, limits.top_k.clamp(1, width) - 1)
    num_k = torch.where(by_k, torch.searchsorted(rising, kth, right=True), width)
    left = torch.where(by_k, mass.gather(1, num_k - 1), totals)
    num_p = torch.searchsorted(mass, (limits.top_p * left).ceil().long()) + 1
    num_m = torch.searchsorted(rising, -limits.min_p.log().float(), right=True)
    kept = torch.minimum(torch.minimum(num_k, num_m), torch.where(limits.top_p < 1, num_p, width)).clamp_(1, width)
    return Prefix(mass, kept, ((kept < width) & (~by_k | (num_k < width)))[:, 0])


def typically(scores: torch.Tensor, weights: torch.Tensor, limits: Limits, num_tops: int) -> Drawn:
    """Typical-p, after the others."""
    values, ids = likeliest(scores, scores.shape[1])
    kept = prefix(values, weights.sum(-1, keepdim=True), limits).kept
    scores = scores.scatter(1, ids, values.masked_fill_(beyond(values.shape[1], kept), OUT))
    scores.masked_fill_(atypical(scores, limits.typical_p), OUT)
    mass = fixed(scores).cumsum(-1)
    totals = mass[:, -1:]
    return told(scores, totals, drawn(mass, totals, limits.numbers), num_tops)


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
