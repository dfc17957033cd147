"""Multinomial sampling by inverse transform, with one uniform number for each row, of the tokens that top-k,
top-p, min-p and typical-p keep; and selection of the likeliest tokens.

Probabilities are summed as integers, whose sum is the same in every order: so a token depends on its own row
and number alone, in any batch and on any device. Of two equally likely tokens the lower id comes first.
"""

from typing import NamedTuple

import torch

LIKELIEST_WEIGHT = 2.0**40
"""The weight of a row's likeliest token: 2**23 equally likely tokens fit into an int64."""
EXCLUDED = float("-inf")


def top_k(scores: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """scores float32 [rows, vocabulary], none above 0 → scores and ids int64 of the `width` likeliest, [rows,
    width].
    """
    if not width:
        return scores[:, :0], scores[:, :0].long()
    keys = scores.view(torch.int32) & 0x7FFFFFFF  # they rise from 0 as scores fall
    places = keys.long() << 32 | torch.arange(scores.shape[1], device=scores.device)
    ids = places.topk(width, largest=False).values & 0xFFFFFFFF
    return scores.gather(1, ids), ids


class SamplerOutput(NamedTuple):
    """Sampled tokens, or tokens of a prompt: ids int64 [rows], logprobs float32 [rows]; and the likeliest
    tokens in their place: top_ids int64 [rows, n], top_logprobs float32 [rows, n].
    """

    ids: torch.Tensor
    logprobs: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor


def empty_output(num_rows: int, num_tops: int, device: torch.device) -> SamplerOutput:
    """Return zeros: ids int64 [rows], logprobs float32 [rows], and both [rows, num_tops], column by column in
    memory.
    """
    ids = torch.zeros(1 + num_tops, num_rows, dtype=torch.int64, device=device)
    logprobs = torch.zeros(1 + num_tops, num_rows, dtype=torch.float32, device=device)
    return SamplerOutput(ids[0], logprobs[0], ids[1:].T, logprobs[1:].T)


def to_weights(scores: torch.Tensor) -> torch.Tensor:
    """scores float32 [rows, vocabulary], the likeliest of a row at 0 → weights int64 [rows, vocabulary]:
    `exp(scores)` in units of 2**-40.
    """
    return scores.exp().mul_(LIKELIEST_WEIGHT).long()


def log_of_weights(weights: torch.Tensor) -> torch.Tensor:
    """weights int64 [...] → their natural logarithms float32 [...], in the units of scores."""
    return weights.double().div_(LIKELIEST_WEIGHT).log_().float()


class DrawParameters(NamedTuple):
    """Parameters of rows, each [rows, 1]: top_k int64, by_likelihood bool, the others float64.

    Attributes:
        top_k, top_p, min_p, typical_p: 0, 1, 0 and 1 keep all tokens.
        by_likelihood: the likeliest tokens come first in the draw, else the lowest ids.
        uniforms: random numbers in [0, 1); 0 draws the first token that is kept.
    """

    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    typical_p: torch.Tensor
    by_likelihood: torch.Tensor
    uniforms: torch.Tensor


def draw(scores: torch.Tensor, parameters: DrawParameters, num_tops: int) -> SamplerOutput:
    """Draw tokens by inverse transform, of those that truncation keeps: scores float32 [rows, vocabulary],
    the likeliest of a row at 0.
    """
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    left_out = torch.ones_like(ordered, dtype=torch.bool)
    left_out.scatter_(1, order, ~is_likely(ordered, parameters))
    is_typical = parameters.typical_p < 1
    kept = scores.masked_fill(left_out, EXCLUDED)
    kept = kept.masked_fill(is_typical & is_atypical(kept, parameters.typical_p), EXCLUDED)
    weights = to_weights(kept)
    cumulative = torch.where(parameters.by_likelihood, weights.gather(1, order), weights).cumsum(-1)
    totals = cumulative[:, -1:]
    wanted = torch.minimum((parameters.uniforms * totals).long(), totals - 1)
    places = torch.searchsorted(cumulative, wanted, right=True)
    places.clamp_(max=scores.shape[1] - 1)  # beyond the end only where scores are NaN
    ids = torch.where(parameters.by_likelihood, order.gather(1, places), places)
    top_ids = top_k(torch.where(is_typical, kept, scores), num_tops)[1]
    total = log_of_weights(totals)
    return SamplerOutput(
        ids[:, 0], (scores.gather(1, ids) - total)[:, 0], top_ids, kept.gather(1, top_ids) - total
    )


def is_likely(ordered: torch.Tensor, parameters: DrawParameters) -> torch.Tensor:
    """scores float32 [rows, vocabulary] in falling order → bool [rows, vocabulary]: the tokens that top-k,
    top-p and min-p keep.

    Top-k keeps the tokens that are as likely as the k-th one. Top-p (arXiv:1904.09751) keeps the fewest that
    have this share of what top-k kept. Min-p (arXiv:2407.01082) keeps the tokens that have this share of the
    likeliest one's probability.
    """
    _, top_p, min_p, *_ = parameters
    kth = ordered.gather(1, parameters.top_k.clamp(1, ordered.shape[1]) - 1)
    in_k = (ordered >= kth) | (parameters.top_k == 0)
    weights = to_weights(ordered)
    wanted = (top_p * weights.masked_fill(~in_k, 0).sum(-1, keepdim=True)).ceil().long().clamp_(min=1)
    in_p = (weights.cumsum(-1) - weights < wanted) | (top_p >= 1)
    return in_k & in_p & (ordered >= min_p.log().float())


def is_atypical(scores: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """scores float32 [rows, vocabulary], share float64 [rows, 1] → bool [rows, vocabulary]: the tokens that
    locally typical sampling (arXiv:2202.00666) leaves out.

    It keeps the fewest tokens with that share whose information is nearest to the entropy, and those as near
    as the last of them. A row's likeliest score is 0: information and entropy both lack the logarithm of the
    total.
    """
    weights = to_weights(scores)
    total = weights.sum(-1, keepdim=True)
    entropy = (scores.exp() * -scores * LIKELIEST_WEIGHT).nan_to_num_(0).long().sum(-1, keepdim=True) / total
    distances = (scores + entropy).float().abs()
    nearest, order = distances.sort(dim=-1)
    wanted = (share * total).ceil().long().clamp_(min=1)
    last = torch.searchsorted(weights.gather(1, order).cumsum(-1), wanted)
    return distances > nearest.gather(1, last.clamp_(max=scores.shape[1] - 1))


def raw_logprobs(logits: torch.Tensor, ids: torch.Tensor, num_tops: int) -> SamplerOutput:
    """logits float [rows, vocabulary] → the model's own log-probabilities of ids int64 [rows], and of the
    `num_tops` likeliest tokens in place of each.
    """
    scores = logits.to(torch.float32, copy=True)
    scores.sub_(scores.amax(-1, keepdim=True))
    total = log_of_weights(to_weights(scores).sum(-1, keepdim=True))
    top_scores, top_ids = top_k(scores, num_tops)
    own = scores.gather(1, ids[:, None]) - total
    return SamplerOutput(ids, own[:, 0], top_ids, top_scores - total)


def write_raw_logprobs(output: SamplerOutput, logits: torch.Tensor, rows: torch.Tensor) -> None:
    """Replace log-probabilities in rows int64 [n] by the model's own, of logits float [rows, vocabulary]."""
    put_into(output, rows, raw_logprobs(logits[rows], output.ids[rows], output.top_ids.shape[1]))


def put_into(output: SamplerOutput, places: torch.Tensor, sampled: SamplerOutput) -> None:
    """Replace the rows at places int64 [group]."""
    for column, values in zip(output, sampled, strict=True):
        (column if column.dim() == 1 else column[:, : values.shape[1]]).index_copy_(0, places, values)
