"""Logits to tokens: chosen on the device, then read."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from gpu_worker.engine.batch.outcome import Told, Top
from gpu_worker.engine.batch.sampling_state import Turn
from gpu_worker.engine.batch.to_device import upload
from gpu_worker.engine.cpu import sampler
from gpu_worker.engine.sampling.multinomial import Drawn, blank
from gpu_worker.engine.sampling.sampler import Way, choose, way_of


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a step sampled, on the host; `tops` by the place of the sample. And what it tells of prompts, in
    the order of its parts.
    """

    ids: list[int]
    logprobs: list[float]
    tops: dict[int, Top] = field(default_factory=dict)
    prompts: list[Told] = field(default_factory=list)


@torch.inference_mode()
def sample(logits: torch.Tensor, turns: Sequence[Turn | None]) -> Drawn:
    """logits [samples, vocabulary]; None is plainly the likeliest."""
    library = sampler.kernels(logits)
    return sampler.choose(library, logits, turns) if library else grouped(logits, turns)


def grouped(logits: torch.Tensor, turns: Sequence[Turn | None]) -> Drawn:
    """Rows that choose in the same way are chosen for together. On CUDA the work is only queued: nothing here
    waits for the device.
    """
    if not any(turns):
        return likeliest_of(logits)
    groups: dict[Way | None, list[int]] = {}
    for place, turn in enumerate(turns):
        groups.setdefault(way_of(turn.manner) if turn else None, []).append(place)
    sampled = blank(len(turns), max(turn.manner.top_n for turn in turns if turn), logits.device)
    for way, places in groups.items():
        put(sampled, upload(places, logits.device), logits, way, [turns[place] for place in places])
    return sampled


def put(
    sampled: Drawn, places: torch.Tensor, logits: torch.Tensor, way: Way | None, turns: Sequence[Turn | None]
) -> None:
    """Chooses for the rows at `places`."""
    rows = logits.index_select(0, places)
    drawn = likeliest_of(rows) if way is None else choose(rows, way, [turn for turn in turns if turn])
    for column, values in zip(sampled, drawn, strict=True):
        (column if column.dim() == 1 else column[:, : values.shape[1]]).index_copy_(0, places, values)


def read(drawn: Drawn, turns: Sequence[Turn | None]) -> Sampled:
    """Drawn columns that are on the host."""
    ids, logprobs, top_ids, top_logprobs = (column.tolist() for column in drawn)
    asked = {place: turn.manner.top_n for place, turn in enumerate(turns) if turn and turn.manner.top_n}
    return Sampled(
        ids,
        logprobs,
        {place: Top(top_ids[place][:num], top_logprobs[place][:num]) for place, num in asked.items()},
    )


def likeliest_of(logits: torch.Tensor) -> Drawn:
    ids, logprobs = greedy(logits)
    return Drawn(ids, logprobs, ids[:, None][:, :0], logprobs[:, None][:, :0])


def greedy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [samples, vocabulary] → ids int64 [samples], natural logarithms of their probabilities float32
    [samples].
    """
    if logits.is_cuda:
        from gpu_worker.engine.cuda.kernels.greedy import (
            likeliest_rows,
        )  # Triton comes with torch's builds for CUDA only

        return likeliest_rows(logits)
    best, ids = logits.max(-1)
    below = logits.to(torch.float32, copy=True).sub_(
        best.float()[:, None]
    )  # in place: another buffer of this size costs page faults
    return ids, below.exp_().sum(-1).log_().neg_()
