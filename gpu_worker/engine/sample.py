"""Logits to tokens."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from gpu_worker.engine import native
from gpu_worker.engine.choose import Way, choose, way_of
from gpu_worker.engine.draw import Drawn
from gpu_worker.engine.manner import Turn
from gpu_worker.engine.rows import Top

SCORES = 2**18  # looked at together on CPU: larger buffers come from the system each time, and their page faults cost more than the sums


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a step sampled, on the host; `tops` by the place of the sample."""

    ids: list[int]
    logprobs: list[float]
    tops: dict[int, Top] = field(default_factory=dict)


@torch.inference_mode()
def sample(logits: torch.Tensor, turns: Sequence[Turn | None]) -> Sampled:
    """logits [samples, vocabulary]; None is plainly the likeliest. Rows that choose in the same way are chosen for together."""
    size = max(1, SCORES // logits.shape[1]) if logits.device.type == "cpu" else len(turns)
    groups: dict[Way | None, list[int]] = {}
    for place, turn in enumerate(turns):
        groups.setdefault(way_of(turn.manner) if turn else None, []).append(place)
    if groups.keys() <= {None}:
        ids, logprobs = greedy(logits)
        return Sampled(ids.tolist(), logprobs.tolist())
    lots = [(way, places[first : first + size]) for way, places in groups.items() for first in range(0, len(places), size)]
    return gathered([(places, drawn(logits[places], way, [turns[place] for place in places])) for way, places in lots], turns)


def drawn(logits: torch.Tensor, way: Way | None, turns: Sequence[Turn | None]) -> Drawn:
    if way is None:
        ids, logprobs = greedy(logits)
        return Drawn(ids, logprobs, ids[:, None][:, :0], logprobs[:, None][:, :0])
    return choose(logits, way, [turn for turn in turns if turn])


def gathered(groups: Sequence[tuple[list[int], Drawn]], turns: Sequence[Turn | None]) -> Sampled:
    """The groups' rows in the order of the samples."""
    sampled = Sampled([0] * len(turns), [0.0] * len(turns))
    for places, drawn in groups:
        columns = (column.tolist() for column in drawn)
        for place, token, logprob, top_ids, top_logprobs in zip(places, *columns, strict=True):
            sampled.ids[place], sampled.logprobs[place] = token, logprob
            turn = turns[place]
            if turn and turn.manner.top_n:
                sampled.tops[place] = Top(top_ids[: turn.manner.top_n], top_logprobs[: turn.manner.top_n])
    return sampled


def greedy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [samples, vocabulary] → ids int64 [samples], natural logarithms of their probabilities float32 [samples]."""
    library = native.library() if logits.device.type == "cpu" and logits.dtype in native.TYPES and logits.stride(1) == 1 else None
    if library:
        return likeliest(logits, library)
    best, ids = logits.max(-1)
    below = logits.to(torch.float32, copy=True).sub_(best.float()[:, None])  # in place: another buffer of this size costs page faults
    return ids, below.exp_().sum(-1).log_().neg_()


def likeliest(logits: torch.Tensor, library: ctypes.CDLL) -> tuple[torch.Tensor, torch.Tensor]:
    """As greedy, going over the logits without writing any."""
    num_rows, size = logits.shape
    ids, logprobs = torch.empty(num_rows, dtype=torch.int64), torch.empty(num_rows)
    pointers = (ids.data_ptr(), logprobs.data_ptr())
    library.tf_likeliest(
        native.TYPES[logits.dtype], torch.get_num_threads(), logits.data_ptr(), num_rows, size, logits.stride(0), *pointers
    )
    return ids, logprobs
