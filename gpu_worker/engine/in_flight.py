"""A launched step, until the host has read what it sampled."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from gpu_worker.engine.batch.outcome import PromptLogprobs
from gpu_worker.engine.batch.rows import RowSlice
from gpu_worker.engine.batch.sampling_state import SampleRequest
from gpu_worker.engine.sampling.multinomial import SamplerOutput
from gpu_worker.engine.sampling.sample import StepSamples, read


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step whose forward was launched.

    Attributes:
        number: of the step.
        logits: [wanted, vocabulary]; on CUDA they may still be computed.
        began_s: monotonic time.
    """

    number: int
    slices: Sequence[RowSlice]
    logits: torch.Tensor
    began_s: float

    @property
    def requests(self) -> list[SampleRequest | None]:
        """How its rows choose, once the host has read the step before."""
        return [
            row_slice.sample_request if row_slice.row.sampling_state else None
            for row_slice in self.slices
            if row_slice.samples
        ]


class InFlightStep:
    """A step whose choice was launched, too; what it chose is on its way to the host."""

    def __init__(
        self,
        launched: LaunchedStep,
        requests: Sequence[SampleRequest | None],
        drawn: SamplerOutput,
        prompts: Sequence[SamplerOutput],
    ) -> None:
        self.number, self.slices, self.began_s = launched.number, launched.slices, launched.began_s
        self.requests, self.ids = requests, drawn.ids
        self.columns, self.prompt_logprobs = copy_to_host(drawn), [copy_to_host(one) for one in prompts]
        self.here = torch.cuda.Event() if drawn.ids.is_cuda else None  # type: ignore[no-untyped-call]
        if self.here:
            self.here.record()

    def read(self) -> StepSamples:
        """Waits for it: the one time in a step that the host waits for the device."""
        if self.here:
            self.here.synchronize()
        return replace(
            read(self.columns, self.requests),
            prompt_logprobs=[pack_logprobs(one) for one in self.prompt_logprobs],
        )


def copy_to_host(drawn: SamplerOutput) -> SamplerOutput:
    """On its way to the host."""
    return SamplerOutput(*(column.to("cpu", non_blocking=True) for column in drawn))


def pack_logprobs(drawn: SamplerOutput) -> PromptLogprobs:
    columns = (drawn.logprobs.float(), drawn.top_ids.int(), drawn.top_logprobs.float())
    return PromptLogprobs(*(column.numpy().tobytes() for column in columns))
