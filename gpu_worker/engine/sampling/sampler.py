"""The choice of rows that ask for something, in the order that the docstring of `Sampling` lists."""

from collections.abc import Callable, Sequence

import torch

from gpu_worker.engine.batch.sampling_state import Manner, Turn
from gpu_worker.engine.batch.to_device import upload
from gpu_worker.engine.sampling.multinomial import Drawn, fixed, from_all, told
from gpu_worker.engine.sampling.penalties import adjust
from gpu_worker.engine.sampling.truncation import Limits, narrowly, typically

Way = Callable[[torch.Tensor, Limits, int], Drawn]
"""Scores float32 [rows, vocabulary] with the likeliest at 0, limits, number of the likeliest to be told →
drawn.
"""


def way_of(manner: Manner) -> Way:
    """Of the next token. Rows of different ways look at different parts of the vocabulary."""
    sampling = manner.sampling
    if sampling.temperature == 0:
        return greedily
    if sampling.typical_p < 1:
        return typically
    return narrowly if sampling.top_k or manner.top_p < 1 or sampling.min_p else widely


def choose(logits: torch.Tensor, way: Way, turns: Sequence[Turn]) -> Drawn:
    """logits [rows, vocabulary], of rows of one way."""
    manners = [turn.manner for turn in turns]
    scores = logits.to(torch.float32, copy=True)
    adjust(scores, manners, [turn.index for turn in turns])
    temper(scores, manners)
    chosen = way(scores, limits(turns, scores.device), max(manner.top_n for manner in manners))
    own = [row for row, manner in enumerate(manners) if manner.sampling.raw_logprobs]
    return told_by_model(chosen, logits, upload(own, logits.device)) if own else chosen


def temper(scores: torch.Tensor, manners: Sequence[Manner]) -> None:
    """In place: the likeliest of each row is 0 then, and no temperature makes the others overflow."""
    scores.sub_(scores.amax(-1, keepdim=True))
    temperatures = upload([manner.sampling.temperature or 1.0 for manner in manners], scores.device)
    scores.div_(temperatures[:, None])


def limits(turns: Sequence[Turn], device: torch.device) -> Limits:
    manners = [turn.manner for turn in turns]
    top_k, top_p = [manner.sampling.top_k for manner in manners], [manner.top_p for manner in manners]
    others = [
        [turn.manner.sampling.min_p, turn.manner.sampling.typical_p, turn.manner.uniforms.at(turn.index)]
        for turn in turns
    ]
    return Limits(
        upload(top_k, device)[:, None] if any(top_k) else None,
        upload(top_p, device, torch.float64)[:, None] if min(top_p) < 1 else None,
        *upload(others, device, torch.float64)[..., None].unbind(1),
    )


def greedily(scores: torch.Tensor, limits: Limits, num_tops: int) -> Drawn:
    return told(scores, fixed(scores).sum(-1, keepdim=True), scores.max(-1, keepdim=True).indices, num_tops)


def widely(scores: torch.Tensor, limits: Limits, num_tops: int) -> Drawn:
    return from_all(scores, limits.numbers, num_tops)


def told_by_model(chosen: Drawn, logits: torch.Tensor, rows: torch.Tensor) -> Drawn:
    """With the model's own log-probabilities for these rows."""
    scores = logits[rows].to(torch.float32)
    scores.sub_(scores.amax(-1, keepdim=True))
    own = told(scores, fixed(scores).sum(-1, keepdim=True), chosen.ids[rows, None], chosen.top_ids.shape[1])
    for column, values in zip(chosen, own, strict=True):
        column[rows] = values
    return chosen
