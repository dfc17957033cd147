"""Rows that choose among a part of the vocabulary: top-k, top-p, min-p, typical-p."""

from typing import NamedTuple

import torch

from gpu_worker.engine.sampling.multinomial import ONE, Drawn, fixed, from_all, log, target_of
from gpu_worker.engine.sampling.top_k import border, keys_of, likeliest

OUT = float("-inf")
ALL = 2**31 - 1
"""Above every key."""


class Limits(NamedTuple):
    """Tensors [rows, 1]: how much each row keeps, and its random number. top_k 0, top_p 1, min_p 0 and
    typical_p 1 keep all; None where all rows' do.
    """

    top_k: torch.Tensor | None
    top_p: torch.Tensor | None
    min_p: torch.Tensor
    typical_p: torch.Tensor
    numbers: torch.Tensor


class Tokens(NamedTuple):
    """What a row's tokens are ordered by, int32 [rows, vocabulary], and what they weigh, int64 [rows,
    vocabulary].
    """

    keys: torch.Tensor
    weights: torch.Tensor

    def before(self, key: torch.Tensor) -> torch.Tensor:
        """What the tokens before one weigh; all [rows, 1]."""
        return self.weights.masked_fill(self.keys >= key, 0).sum(-1, keepdim=True)

    def each(self, key: torch.Tensor) -> torch.Tensor:
        """What one with this key weighs: as much as the others."""
        return self.weights.masked_fill(self.keys != key, 0).amax(-1, keepdim=True)

    def reach(self, mass: torch.Tensor) -> "Prefix":
        """The fewest first tokens that weigh so much, or one."""
        mass = mass.clamp(min=1)
        key = border(self.keys, self.weights, mass - 1)
        each = self.each(key).clamp_(min=1)
        return Prefix(key, (mass - self.before(key) + each - 1) // each)


class Prefix(NamedTuple):
    """The first tokens of each row: those before `key`, int32 [rows, 1], and of those with that key the first
    `ties`, int64 [rows, 1].
    """

    key: torch.Tensor
    ties: torch.Tensor

    def mask(self, keys: torch.Tensor) -> torch.Tensor:
        """bool [rows, vocabulary]"""
        tied = keys == self.key
        return (keys < self.key) | (tied & (tied.cumsum(-1) <= self.ties))


def narrowly(scores: torch.Tensor, limits: Limits, num_tops: int) -> Drawn:
    """Without typical-p: the likeliest, in their order."""
    tokens = Tokens(keys_of(scores), fixed(scores))
    kept = prefix(tokens, limits).mask(tokens.keys)
    mass = tokens.weights.masked_fill(~kept, 0).sum(-1, keepdim=True)
    drawn, total = tokens.reach(target_of(limits.numbers, mass) + 1), log(mass)
    tied = tokens.keys == drawn.key
    ids = (tied & (tied.cumsum(-1) == drawn.ties)).byte().argmax(-1, keepdim=True)
    tops, top_ids = likeliest(scores, num_tops)
    tops = tops.masked_fill(~kept.gather(1, top_ids), OUT)
    return Drawn(ids[:, 0], (scores.gather(1, ids) - total)[:, 0], top_ids, tops - total)


def prefix(tokens: Tokens, limits: Limits) -> Prefix:
    """What each row keeps.

    Top-k keeps what is as likely as the last of k; top-p (arXiv:1904.09751) the fewest that have this share
    of what top-k left; min-p (arXiv:2407.01082) what has this share of the likeliest's probability.
    """
    last = keys_of(limits.min_p.log().float())
    left = tokens.weights.sum(-1, keepdim=True)
    if limits.top_k is not None:
        kth = border(
            tokens.keys, torch.ones_like(tokens.weights), limits.top_k.clamp(1, tokens.keys.shape[1]) - 1
        )
        kth.masked_fill_(limits.top_k == 0, ALL - 1)
        last, left = torch.minimum(last, kth), tokens.before(kth + 1)
    whole = Prefix(last, torch.full_like(left, ALL))
    if limits.top_p is None:
        return whole
    by_p = tokens.reach((limits.top_p * left).ceil().long())
    inside = (limits.top_p < 1) & (by_p.key <= last)
    return Prefix(*(torch.where(inside, fewer, more) for fewer, more in zip(by_p, whole, strict=True)))


def typically(scores: torch.Tensor, limits: Limits, num_tops: int) -> Drawn:
    """Typical-p, after the others."""
    tokens = Tokens(keys_of(scores), fixed(scores))
    scores = scores.masked_fill(~prefix(tokens, limits).mask(tokens.keys), OUT)
    return from_all(scores.masked_fill_(atypical(scores, limits.typical_p), OUT), limits.numbers, num_tops)


def atypical(scores: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """What locally typical sampling (arXiv:2202.00666) leaves out, bool [rows, vocabulary].

    It keeps the fewest tokens with that share whose information is nearest to the entropy, and what is as
    near as the last of them. The likeliest of a row is at 0: information and entropy both lack the logarithm
    of the total.
    """
    weights = fixed(scores)
    total = weights.sum(-1, keepdim=True)
    entropy = (scores.exp() * -scores * ONE).nan_to_num_(0).long().sum(-1, keepdim=True) / total
    farness = keys_of((scores + entropy).float())
    return farness > Tokens(farness, weights).reach((share * total).ceil().long()).key
