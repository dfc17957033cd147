"""The choice of rows that ask for something, in the order that the docstring of `Sampling` lists."""

from collections.abc import Callable, Sequence

import torch

from gpu_worker.engine.adjust import adjust
from gpu_worker.engine.draw import Drawn, draw, fixed, told
from gpu_worker.engine.manner import Manner, Turn
from gpu_worker.engine.truncate import Limits, narrowly, typically

Way = Callable[[torch.Tensor, torch.Tensor, Limits, int], Drawn]
"""Scores float32 [rows, vocabulary] with the likeliest at 0, their weights, limits, number of the likeliest to be told → drawn."""


def way_of(manner: Manner) -> Way:
    """Rows of different ways look at different parts of the vocabulary."""
    sampling = manner.sampling
    if sampling.temperature == 0:
        return greedily
    if sampling.typical_p < 1:
        return typically
    return narrowly if sampling.top_k or sampling.top_p < 1 or sampling.min_p else widely


def choose(logits: torch.Tensor, way: Way, turns: Sequence[Turn]) -> Drawn:
    """logits [rows, vocabulary], of rows of one way."""
    manners = [turn.manner for turn in turns]
    scores = logits.to(torch.float32, copy=True)
    adjust(scores, manners, [turn.index for turn in turns])
    temper(scores, manners)
    drawn = way(scores, fixed(scores), limits(turns, scores.device), max(manner.top_n for manner in manners))
    own = [row for row, manner in enumerate(manners) if manner.sampling.raw_logprobs]
    return told_by_model(drawn, logits, own) if own else drawn


def temper(scores: torch.Tensor, manners: Sequence[Manner]) -> None:
    """In place: the likeliest of each row is 0 then, and no temperature makes the others overflow."""
    scores.sub_(scores.amax(-1, keepdim=True))
    temperatures = torch.tensor([manner.sampling.temperature or 1.0 for manner in manners], device=scores.device)
    scores.div_(temperatures[:, None])


def limits(turns: Sequence[Turn], device: torch.device) -> Limits:
    sampled = [turn.manner.sampling for turn in turns]
    shares = [[one.top_p for one in sampled], [one.min_p for one in sampled], [one.typical_p for one in sampled]]
    numbers = [turn.manner.uniforms.at(turn.index) for turn in turns]
    return Limits(
        torch.tensor([one.top_k for one in sampled], device=device), *torch.tensor([*shares, numbers], dtype=torch.float64, device=device)
    )


def greedily(scores: torch.Tensor, weights: torch.Tensor, limits: Limits, num_tops: int) -> Drawn:
    return told(scores, weights, scores.max(-1, keepdim=True).indices, num_tops)


def widely(scores: torch.Tensor, weights: torch.Tensor, limits: Limits, num_tops: int) -> Drawn:
    """Among all tokens: nothing needs to be sorted."""
    return draw(scores, weights, limits.numbers, num_tops)


def told_by_model(drawn: Drawn, logits: torch.Tensor, rows: list[int]) -> Drawn:
    """With the model's own log-probabilities for these rows."""
    scores = logits[rows].to(torch.float32)
    scores.sub_(scores.amax(-1, keepdim=True))
    own = told(scores, fixed(scores), drawn.ids[rows, None], drawn.top_ids.shape[1])
    for column, values in zip(drawn, own, strict=True):
        column[rows] = values
    return drawn
