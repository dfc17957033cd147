"""What steps brought, until it is told to the agent."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import starmap
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gpu_worker.protocol import SAMPLE, StepResult

Int32 = npt.NDArray[np.int32]


class TopLogprobs(NamedTuple):
    """The likeliest tokens beside a sampled one, likeliest first; those that truncation took away have -inf."""

    ids: list[int]
    logprobs: list[float]


NO_TOP_LOGPROBS: Mapping[int, TopLogprobs] = {}


class PromptLogprobs(NamedTuple):
    """What a part tells of its prompt: packed log-probabilities, and packed ids and log-probabilities of the
    likeliest tokens.
    """

    logprobs: bytes
    top_ids: bytes
    top_logprobs: bytes


NO_PROMPT_LOGPROBS: Sequence[PromptLogprobs] = ()


@dataclass(slots=True)
class StepResultBuilder:
    """What is to be reported with the next frame.

    Attributes:
        samples: row, index, id, log-probability.
        freed: blocks of released rows.
    """

    samples: list[tuple[int, int, int, float]] = field(default_factory=list)
    top_logprobs: list[tuple[int, bytes, bytes]] = field(default_factory=list)
    prompt_logprobs: list[tuple[int, int, bytes, bytes, bytes]] = field(default_factory=list)
    prefilled: list[tuple[int, int]] = field(default_factory=list)
    ended: list[tuple[int, str, int]] = field(default_factory=list)
    released: list[tuple[int, int]] = field(default_factory=list)
    freed: list[Int32] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.samples or self.ended or self.released)

    def build(self, step: int, duration_ms: float) -> StepResult:
        return StepResult(
            step,
            b"".join(starmap(SAMPLE.pack, self.samples)),
            tuple(self.top_logprobs),
            tuple(self.prompt_logprobs),
            tuple(self.prefilled),
            tuple(self.ended),
            tuple(self.released),
            duration_ms,
        )
