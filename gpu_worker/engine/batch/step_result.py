"""Step results: what steps brought, collected for the next frame to the agent."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import starmap
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gpu_worker.protocol import SAMPLE, StepResult

Int32 = npt.NDArray[np.int32]


class TopLogprobs(NamedTuple):
    """The likeliest tokens in place of a sampled one, likeliest first; -inf for those that truncation
    excludes.
    """

    ids: list[int]
    logprobs: list[float]


NO_TOP_LOGPROBS: Mapping[int, TopLogprobs] = {}


class PromptLogprobs(NamedTuple):
    """Log-probabilities of a slice of a prompt: packed float32, and the likeliest tokens as packed int32 ids
    and packed float32 log-probabilities.
    """

    logprobs: bytes
    top_ids: bytes
    top_logprobs: bytes


NO_PROMPT_LOGPROBS: Sequence[PromptLogprobs] = ()


@dataclass(slots=True)
class StepResultBuilder:
    """Collects the next `StepResult`.

    Attributes:
        samples: (row, index, id, log-probability).
        freed, freed_slots: blocks of released rows whose KV is not kept, and slots of their states.
        num_encoded: units of pictures that were encoded: the next step may go on behind them.
    """

    samples: list[tuple[int, int, int, float]] = field(default_factory=list)
    top_logprobs: list[tuple[int, bytes, bytes]] = field(default_factory=list)
    prompt_logprobs: list[tuple[int, int, bytes, bytes, bytes]] = field(default_factory=list)
    prefilled: list[tuple[int, int]] = field(default_factory=list)
    ended: list[tuple[int, str, int]] = field(default_factory=list)
    released: list[tuple[int, int]] = field(default_factory=list)
    freed: list[Int32] = field(default_factory=list)
    freed_slots: list[int] = field(default_factory=list)
    prefill_tokens: int = 0
    proposals: list[tuple[str, int, int]] = field(default_factory=list)
    logits: list[tuple[int, int, bytes]] = field(default_factory=list)
    num_beams: int = 0
    sequences: list[tuple[int, bytes]] = field(default_factory=list)
    num_encoded: int = 0
    snapshots: list[int] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.samples or self.ended or self.released or self.num_encoded)

    def build(self, step: int, duration_ms: float) -> StepResult:
        return StepResult(
            step=step,
            samples=b"".join(starmap(SAMPLE.pack, self.samples)),
            top_logprobs=tuple(self.top_logprobs),
            prompt_logprobs=tuple(self.prompt_logprobs),
            prefilled=tuple(self.prefilled),
            ended=tuple(self.ended),
            released=tuple(self.released),
            duration_ms=duration_ms,
            prefill_tokens=self.prefill_tokens,
            proposals=tuple(self.proposals),
            logits=tuple(self.logits),
            num_beams=self.num_beams,
            sequences=tuple(self.sequences),
            snapshots=tuple(self.snapshots),
        )
