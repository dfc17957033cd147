"""Multinomial sampling by inverse transform, with one uniform number for each row; and selection of the
likeliest tokens.

Probabilities are summed as integers, whose sum is the same in every order: so a token depends on its own row
and number alone, in any batch and on any device. Of two equally likely tokens the lower id comes first.
"""

from typing import NamedTuple

import torch

LIKELIEST_WEIGHT = 2.0**40
"""The weight of a row's likeliest token: 2**23 equally likely tokens fit into an int64."""
EXCLUDED = float("-inf")
KEY_DIGITS = ((20, 11), (10, 10), (0, 10))
"""The digits of a key's 31 bits: shift and number of bits."""


def sort_keys(scores: torch.Tensor) -> torch.Tensor:
    """scores float32 [rows, vocabulary], none above 0 → keys int32 [rows, vocabulary], which rise from 0 as
    scores fall: the bits of the score without its sign
    """
    return scores.view(torch.int32) & 0x7FFFFFFF


def top_k(scores: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """scores float32 [rows, vocabulary], none above 0 → scores and ids int64 of the `width` likeliest, [rows,
    width].
    """
    if not width:
        return scores[:, :0], scores[:, :0].long()
    places = sort_keys(scores).long() << 32 | torch.arange(scores.shape[1], device=scores.device)
    ids = places.topk(width, largest=False).values & 0xFFFFFFFF
    return scores.gather(1, ids), ids


def kth_key(keys: torch.Tensor, weights: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """keys int32 [rows, n], none negative; weights int64 [rows, n], none negative; targets int64 [rows, 1] →
    int32 [rows, 1]: the least key of each row such that tokens with keys up to it weigh more than the target;
    a key above all others if there is none. With weights of 1 and target k - 1 it is the k-th key.

    By radix, without sorting: the weights of the tokens by digit tell the digit of the key, and only tokens
    with that digit remain for the next one.
    """
    found, left = torch.zeros_like(targets), targets
    for shift, bits in KEY_DIGITS:
        digits = (keys >> shift & (1 << bits) - 1).long()
        masses = weights.new_zeros(len(keys), 1 << bits).scatter_add_(1, digits, weights)
        ends = masses.cumsum(-1)
        digit = torch.searchsorted(ends, left, right=True).clamp_(max=(1 << bits) - 1)
        left = left - (ends - masses).gather(1, digit)
        weights = weights.masked_fill(digits != digit, 0)
        found |= digit << shift
    return found.int()


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


def pick(cumulative: torch.Tensor, totals: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Pick a candidate for each row → int64 [rows, 1].

    cumulative int64 [rows, n]: sums of the weights up to each candidate; totals int64 [rows, 1]: the sum up
    to the last candidate that may be picked; uniforms float64 [rows, 1] in [0, 1).
    """
    places = torch.searchsorted(cumulative, target_weight(uniforms, totals), right=True)
    return places.clamp_(max=cumulative.shape[1] - 1)  # beyond the end only where scores are NaN


def target_weight(uniforms: torch.Tensor, totals: torch.Tensor) -> torch.Tensor:
    """uniforms float64 [rows, 1], totals int64 [rows, 1] → int64 [rows, 1]: the candidate that is picked is
    the first one up to which candidates weigh more.
    """
    return torch.minimum((uniforms * totals).long(), totals - 1)


def multinomial_sample(scores: torch.Tensor, uniforms: torch.Tensor, num_tops: int) -> SamplerOutput:
    """Sample from all tokens, without sorting: scores float32 [rows, vocabulary], uniforms float64 [rows,
    1].
    """
    cumulative = to_weights(scores).cumsum(-1)
    totals = cumulative[:, -1:]
    return make_output(scores, totals, pick(cumulative, totals, uniforms), num_tops)


def make_output(
    scores: torch.Tensor, totals: torch.Tensor, ids: torch.Tensor, num_tops: int
) -> SamplerOutput:
    """The output for ids int64 [rows, 1], by scores float32 [rows, vocabulary] and totals int64 [rows, 1],
    the sums of the rows' weights.
    """
    top_scores, top_ids = top_k(scores, num_tops)
    total = log_of_weights(totals)
    return SamplerOutput(ids[:, 0], (scores.gather(1, ids) - total)[:, 0], top_ids, top_scores - total)


def raw_logprobs(logits: torch.Tensor, ids: torch.Tensor, num_tops: int) -> SamplerOutput:
    """logits float [rows, vocabulary] → the model's own log-probabilities of ids int64 [rows], and of the
    `num_tops` likeliest tokens in place of each.
    """
    scores = logits.to(torch.float32, copy=True)
    scores.sub_(scores.amax(-1, keepdim=True))
    totals = to_weights(scores).sum(-1, keepdim=True)
    return make_output(scores, totals, ids[:, None], num_tops)


def write_raw_logprobs(output: SamplerOutput, logits: torch.Tensor, rows: torch.Tensor) -> None:
    """Replace log-probabilities in rows int64 [n] by the model's own, of logits float [rows, vocabulary]."""
    put_into(output, rows, raw_logprobs(logits[rows], output.ids[rows], output.top_ids.shape[1]))


def put_into(output: SamplerOutput, places: torch.Tensor, sampled: SamplerOutput) -> None:
    """Replace the rows at places int64 [group]."""
    for column, values in zip(output, sampled, strict=True):
        (column if column.dim() == 1 else column[:, : values.shape[1]]).index_copy_(0, places, values)
