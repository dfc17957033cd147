"""Rows that choose among a part of the vocabulary: top-k, top-p, min-p, typical-p."""

from typing import NamedTuple

import torch

from gpu_worker.engine.draw import ONE, Drawn, draw, fixed
from gpu_worker.engine.likeliest import likeliest, widths

OUT = float("-inf")


class Limits(NamedTuple):
    """Tensors [rows]: how much each row keeps, and its random number. top_k 0, top_p 1, min_p 0 and typical_p 1 keep all."""

    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    typical_p: torch.Tensor
    numbers: torch.Tensor

    def of(self, rows: torch.Tensor) -> "Limits":
        return Limits(*(column[rows] for column in self))


def narrowly(scores: torch.Tensor, weights: torch.Tensor, limits: Limits, num_tops: int) -> Drawn:
    """Without typical-p: the likeliest few, so not all are sorted."""
    return within(scores, weights.sum(-1), limits, num_tops, widths(scores))


def within(scores: torch.Tensor, totals: torch.Tensor, limits: Limits, num_tops: int, widths: list[int]) -> Drawn:
    """Looks at the first of `widths` likeliest tokens; goes on for the rows that need more."""
    values, ids = likeliest(scores, widths[0])
    kept, sure = prefix(values, totals, limits)
    values.masked_fill_(beyond(values, kept), OUT)
    place, logprobs, top_places, top_logprobs = draw(values, fixed(values), limits.numbers, num_tops)
    drawn = Drawn(at(ids, place), logprobs, ids.gather(1, top_places), top_logprobs)
    if len(widths) > 1 and not sure.all():
        rows = (~sure).nonzero()[:, 0]
        wider = within(scores[rows], totals[rows], limits.of(rows), num_tops, widths[1:])
        for column, found in zip(drawn, wider, strict=True):
            column[rows] = found
    return drawn


def prefix(values: torch.Tensor, totals: torch.Tensor, limits: Limits) -> tuple[torch.Tensor, torch.Tensor]:
    """How many of the likeliest tokens each row keeps, and whether that is known without looking at more: int64 [rows], bool [rows].

    Top-k keeps what is as likely as the last of k; top-p (arXiv:1904.09751) the fewest that have this share of what top-k left; min-p
    (arXiv:2407.01082) what has this share of the likeliest's probability.
    """
    width = values.shape[1]
    mass = fixed(values).cumsum(-1)
    by_k = limits.top_k > 0
    kth = at(values, limits.top_k.clamp(1, width) - 1)
    num_k = torch.where(by_k, (values >= kth[:, None]).sum(-1), width).clamp_(min=1)  # at least one also where scores are not numbers
    left = torch.where(by_k, at(mass, num_k - 1), totals)
    num_p = torch.where(limits.top_p < 1, (mass < (limits.top_p * left)[:, None]).sum(-1) + 1, width)
    num_m = (values >= limits.min_p.log()[:, None]).sum(-1)
    kept = torch.minimum(torch.minimum(num_k, num_p), num_m).clamp_(min=1)
    return kept, (kept < width) & (~by_k | (num_k < width))


def typically(scores: torch.Tensor, weights: torch.Tensor, limits: Limits, num_tops: int) -> Drawn:
    """Typical-p, after the others."""
    values, ids = likeliest(scores, scores.shape[1])
    kept, _ = prefix(values, weights.sum(-1), limits)
    scores = scores.scatter(1, ids, values.masked_fill_(beyond(values, kept), OUT))
    scores.masked_fill_(atypical(scores, limits.typical_p), OUT)
    return draw(scores, fixed(scores), limits.numbers, num_tops)


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
    num = (weights.gather(1, order).cumsum(-1) < share[:, None] * total).sum(-1).clamp_(max=scores.shape[1] - 1)
    return nearness < at(nearest, num)[:, None]


def beyond(values: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    return torch.arange(values.shape[1], device=values.device) >= kept[:, None]


def at(values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """values [rows, n], places int64 [rows] → [rows]."""
    return values.gather(1, places[:, None])[:, 0]
