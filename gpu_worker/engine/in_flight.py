"""A step in flight: launched on the device, not yet read by the host; and the pace of launches."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgpack
import torch

from gpu_worker.engine.batch.beams import BeamScores
from gpu_worker.engine.batch.row import RowSlice
from gpu_worker.engine.batch.sampling_state import SampleRequest
from gpu_worker.engine.batch.step_result import Candidate, PromptLogprobs, StepSamples, TopLogprobs
from gpu_worker.engine.sampling.logprobs import CopiedLogits
from gpu_worker.engine.sampling.multinomial import SamplerOutput

RAISE_IF_LATE = 1 / 8
LOWER_IF_IN_TIME = 1 / 512
"""After a late launch, which left the device idle, the lead grows by this share of a step; after a launch in
time it shrinks by that one. So one launch in 64 is late, by little.
"""
LEAST_LEAD = 1 / 16
MAX_GROWTH = 1.02
"""The expected duration of a step grows by at most this factor: a step that the host reads late says nothing
of the next one.
"""


@dataclass(slots=True)
class LaunchPace:
    """Tells when the next step is launched.

    A step is launched before the step before it is read, so that the device does not wait for the host. A
    grant that comes after the launch waits for one more step. So a launch waits for grants until the step
    that runs is nearly over.

    Attributes:
        step_s: the expected duration of a step without prefill; 0 while unknown.
        lead: the share of it that is left when the next step is launched.
        read_s: monotonic time at which the last step was read: the next one has begun by then.
    """

    step_s: float = 0.0
    lead: float = 1.0
    read_s: float = 0.0

    def slack_s(self, now_s: float) -> float:
        """How long the next launch may wait."""
        return self.read_s + (1 - self.lead) * self.step_s - now_s

    def on_launch(self, is_late: bool) -> None:
        """A step is launched while the step before it runs, or late: after that one has run."""
        self.lead = (
            min(1.0, self.lead + RAISE_IF_LATE) if is_late else max(LEAST_LEAD, self.lead - LOWER_IF_IN_TIME)
        )

    def on_read(self, started_s: float, now_s: float, prefill_tokens: int) -> float:
        """A step that was launched at `started_s` is read → its duration in s, without the time in which the
        step before it ran.
        """
        duration_s = now_s - max(started_s, self.read_s)
        self.read_s = now_s
        if not prefill_tokens:
            self.step_s = min(duration_s, MAX_GROWTH * self.step_s) if self.step_s else duration_s
        return duration_s


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step whose forward was launched.

    Attributes:
        number: number of the step.
        logits: float [num_logits, vocabulary]; on CUDA they may still be computed.
        started_s: monotonic time.
    """

    number: int
    slices: Sequence[RowSlice]
    logits: torch.Tensor
    started_s: float


def sample_requests(slices: Sequence[RowSlice]) -> list[SampleRequest | None]:
    """The requests of the rows that sample, once the host has read the step before; None for greedy samples
    and for those that are dropped.
    """
    requests: list[SampleRequest | None] = []
    for row_slice in slices:
        row = row_slice.row
        if row.sampling_state is None or row.ended or row_slice.is_void:
            requests += [None] * row_slice.num_samples
        elif row_slice.samples:
            requests += row_slice.sample_requests
    return requests


def pack_samples(samples: StepSamples) -> bytes:
    """Pack what a step sampled, for another rank."""
    data: bytes = msgpack.packb([getattr(samples, name) for name in StepSamples.__slots__])
    return data


def unpack_sent_samples(data: bytes) -> StepSamples:
    """Unpack what another rank sampled."""
    ids, logprobs, tops, prompts, candidates, logits = msgpack.unpackb(data, strict_map_key=False)
    return StepSamples(
        ids,
        logprobs,
        {place: TopLogprobs(*top) for place, top in tops.items()},
        [PromptLogprobs(*prompt) for prompt in prompts],
        {number: [Candidate(*one) for one in found] for number, found in candidates.items()},
        [(row, position, values) for row, position, values in logits],
    )


class InFlightStep:
    """A step whose sampling was launched, too. Its tokens are being copied to the host.

    Attributes:
        ids: int64 [rows], on the device.
        logits: those that rows return.
    """

    def __init__(
        self,
        launched: LaunchedStep,
        requests: Sequence[SampleRequest | None],
        output: SamplerOutput,
        prompts: Sequence[SamplerOutput],
        logits: Sequence[CopiedLogits] = (),
        beams: BeamScores | None = None,
    ) -> None:
        self.number = launched.number
        self.slices = launched.slices
        self.started_s = launched.started_s
        self.requests = requests
        self.ids = output.ids
        self.output = copy_to_host(output)
        self.prompts = [copy_to_host(prompt) for prompt in prompts]
        self.logits = logits
        self.beams = beams.to_host() if beams else None
        self.copied = torch.cuda.Event() if output.ids.is_cuda else None  # type: ignore[no-untyped-call]
        if self.copied:
            self.copied.record()

    @property
    def is_unsure(self) -> bool:
        """Whether the next step can be launched only once this one is read."""
        return any(row_slice.is_unsure for row_slice in self.slices)

    @property
    def is_done(self) -> bool:
        """Whether the device has computed it; always False on CPU."""
        return bool(self.copied and self.copied.query())  # type: ignore[no-untyped-call]

    def read(self) -> StepSamples:
        """Wait for the step → what it sampled. Here alone the host waits for the device within a step."""
        if self.copied:
            self.copied.synchronize()
        prompts = [pack_logprobs(prompt) for prompt in self.prompts]
        candidates = self.beams.candidates() if self.beams else {}
        logits = [piece for copied in self.logits for piece in copied.pieces()]
        samples = unpack_samples(self.output, self.requests, prompts)
        return replace(samples, candidates=candidates, logits=logits)


@dataclass(frozen=True, slots=True)
class SentStep:
    """A step of a pipeline. The rank that samples sends what it sampled; on others `read` waits for it."""

    number: int
    slices: Sequence[RowSlice]
    started_s: float
    read: Callable[[], StepSamples]


def copy_to_host(output: SamplerOutput) -> SamplerOutput:
    """Queue the copy to the host: ids int64 [rows], logprobs float32 [rows], and top [rows, n]."""
    return SamplerOutput(*(column.to("cpu", non_blocking=True) for column in output))


def unpack_samples(
    output: SamplerOutput,
    requests: Sequence[SampleRequest | None],
    prompt_logprobs: Sequence[PromptLogprobs] = (),
) -> StepSamples:
    """Convert columns on the host (ids int64 [rows], logprobs float32 [rows]) to lists."""
    ids, logprobs, top_ids, top_logprobs = (column.tolist() for column in output)
    counts = {
        place: request.state.top_n_tokens
        for place, request in enumerate(requests)
        if request and request.state.top_n_tokens
    }
    tops = {
        place: TopLogprobs(top_ids[place][:count], top_logprobs[place][:count])
        for place, count in counts.items()
    }
    return StepSamples(ids, logprobs, tops, list(prompt_logprobs))


def pack_logprobs(output: SamplerOutput) -> PromptLogprobs:
    """Pack columns on the host, logprobs float32 [tokens] and top [tokens, n]."""
    columns = (output.logprobs.float(), output.top_ids.int(), output.top_logprobs.float())
    return PromptLogprobs(*(column.numpy().tobytes() for column in columns))
