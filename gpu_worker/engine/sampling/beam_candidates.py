"""The best continuations of beams: one top-k over the logits of all beams of a search.

Scores are transformers': penalties, bans and masks change log-probabilities, not logits, in float32.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice

import torch

from gpu_worker.engine.batch.beam_group import BeamGroup
from gpu_worker.engine.batch.beam_search import BeamSearch, Candidate
from gpu_worker.engine.batch.inputs import to_device
from gpu_worker.engine.batch.row import RowSlice
from gpu_worker.engine.batch.sampling_state import SampleRequest
from gpu_worker.engine.sampling.penalties import adjust_scores


@dataclass(frozen=True, slots=True)
class SearchStep:
    """The samples of one beam search in a step: `begin` to `end` among all samples, one for each beam.
    `num_found` continuations are looked for.
    """

    number: int
    search: BeamSearch
    begin: int
    end: int
    num_found: int


def search_steps(
    slices: Sequence[RowSlice], groups: Mapping[int, BeamGroup], vocab_size: int
) -> Iterator[SearchStep]:
    """Yield the searches that sample in a step of these slices. The slices of a search are neighbours. One
    that has lost a beam, since its forward failed, has ended.
    """
    end = 0
    for number, parts in groupby(slices, lambda row_slice: row_slice.row.number):
        begin, end = end, end + sum(row_slice.num_samples for row_slice in parts)
        group = groups.get(number)
        if group and end - begin == len(group.search.beams):
            num_found = min(group.search.num_candidates, (end - begin) * vocab_size)
            yield SearchStep(number, group.search, begin, end, num_found)


@dataclass(frozen=True, slots=True)
class BeamScores:
    """The best continuations of the searches of a step, one search after the other, the best first.

    Attributes:
        places: int64 [2, continuations]; place of the beam in its search, and token.
        scores: float32 [2, continuations]; log-probability of the token, and the sum up to it.
    """

    steps: Sequence[SearchStep]
    places: torch.Tensor
    scores: torch.Tensor

    def to_host(self) -> "BeamScores":
        """Queue the copy to the host."""
        columns = (column.to("cpu", non_blocking=True) for column in (self.places, self.scores))
        return BeamScores(self.steps, *columns)

    def candidates(self) -> dict[int, list[Candidate]]:
        """Return the continuations on the host, by the number of the search."""
        found = map(Candidate, *self.places.tolist(), *self.scores.tolist())
        return {step.number: list(islice(found, step.num_found)) for step in self.steps}


@torch.inference_mode()
def score_beams(
    logits: torch.Tensor,
    requests: Sequence[SampleRequest | None],
    steps: Sequence[SearchStep],
    samples: bool,
) -> BeamScores:
    """logits float [rows, vocabulary] and requests of all samples of a step → the continuations of its
    searches; room for those of another rank if this one does not sample.
    """
    if not samples:
        size = sum(step.num_found for step in steps)
        places = torch.zeros((2, size), dtype=torch.int64, device=logits.device)
        scores = torch.zeros((2, size), dtype=torch.float32, device=logits.device)
    else:
        found = [
            best_continuations(logits[step.begin : step.end], requests[step.begin : step.end], step)
            for step in steps
        ]
        places, scores = (torch.cat(columns, 1) for columns in zip(*found, strict=True))
    return BeamScores(steps, places, scores)


def best_continuations(
    logits: torch.Tensor, requests: Sequence[SampleRequest | None], step: SearchStep
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits float [beams, vocabulary] → places int64 [2, n], scores float32 [2, n], as BeamScores has them.

    With a diversity rate continuations are ranked by their sum plus the rate times the place of their beam,
    the best beam's being 0; the sum itself stays. So TensorRT-LLM ranks them by `beamSearchDiversityRate`
    (beamStage3Kernel in cpp/tensorrt_llm/kernels/beamSearchKernels/beamSearchKernelsTemplate.h).
    """
    logprobs = logits.float().log_softmax(-1)
    known = [request for request in requests if request]
    if known:
        adjust_scores(logprobs, [one.state for one in known], [one.index for one in known])
    totals = logprobs + to_device(step.search.totals, logits.device, torch.float32)[:, None]
    ranked = totals
    if diversity := step.search.params.diversity:
        ranked = totals + diversity * torch.arange(len(totals), device=logits.device)[:, None]
    best = ranked.flatten().topk(step.num_found).indices
    places = torch.stack((best // logits.shape[1], best % logits.shape[1]))
    return places, torch.stack((logprobs.flatten()[best], totals.flatten()[best]))
