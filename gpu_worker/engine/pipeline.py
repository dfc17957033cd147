"""Pipeline engine: the engine of one rank of a pipeline, whose stages compute different micro-batches at the
same time (arXiv:1811.06965).

All ranks launch the same micro-batches in the same order. A rank launches until as many are in flight as
there are stages, then waits for the samples of the oldest. So a stage computes one micro-batch while the
others compute those before and after it. The last stage samples, and sends what it sampled to all ranks.
"""

import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from common.model_files import Progress, no_progress
from common.settings.settings import Settings
from gpu_worker.engine.batch.inputs import build_inputs
from gpu_worker.engine.batch.row import RowSlice
from gpu_worker.engine.engine import Engine
from gpu_worker.engine.in_flight import LaunchedStep, StepSamples, pack_samples, unpack_sent_samples
from gpu_worker.engine.model import warmup
from gpu_worker.engine.model.model import LoadedModel
from gpu_worker.engine.parallel.communicator import SAMPLES, SINGLE_RANK, Communicator, Expected
from gpu_worker.protocol import StepResult

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A micro-batch in flight, and its samples, which another rank may send."""

    launched: LaunchedStep
    samples: StepSamples | Expected


class PipelineEngine(Engine):
    """Runs one stage's part of the steps.

    Attributes:
        pending: the micro-batches in flight, oldest first.
    """

    def __init__(
        self,
        settings: Settings,
        progress: Progress = no_progress,
        communicator: Communicator = SINGLE_RANK,
        loaded: LoadedModel | None = None,
    ) -> None:
        self.pending = deque[MicroBatch]()
        super().__init__(settings, progress, communicator, loaded)

    def compile_and_capture(self, settings: Settings, progress: Progress) -> None:
        """Compile layers. Steps are not captured, since each needs the states of the stage before it."""
        super().compile_and_capture(settings, progress)
        log.info("PIPELINE_PARALLEL_SIZE: steps run without CUDA graphs")

    def step(self) -> StepResult | None:
        """Launch what may be in flight, then read the oldest micro-batch → its result; None if none is in
        flight and no row ended.
        """
        communicator = self.communicator
        while len(self.pending) < self.rows.num_micro_batches and (launched := self.launch()):
            samples = self.sample_and_send(launched) if communicator.samples else self.expect_samples()
            self.pending.append(MicroBatch(launched, samples))
        oldest = self.pending.popleft() if self.pending else None
        duration_ms = self.read(oldest) if oldest else 0.0
        return self.take_result(oldest is not None, duration_ms)

    def expect_samples(self) -> Expected:
        return self.communicator.expect_bytes(self.communicator.sampler, SAMPLES)

    def sample_and_send(self, launched: LaunchedStep) -> StepSamples:
        """Sample for all ranks. This waits for the device, since other stages wait for the ids."""
        in_flight = super().sample(launched)
        assert in_flight
        samples = in_flight.read()
        self.communicator.send_to_all(pack_samples(samples), SAMPLES)
        return samples

    def share(self, sampled: torch.Tensor) -> None:
        """Do nothing: other ranks do not wait for what this one has sampled, [...] of any dtype, yet."""

    @torch.inference_mode()
    def compute(self, slices: Sequence[RowSlice], previous: torch.Tensor | None) -> torch.Tensor:
        """This stage's part of a step → logits float [num_logits, vocabulary]; in a stage before the last
        hidden states [tokens, hidden], which go to the next stage.
        """
        loaded, communicator = self.loaded, self.communicator
        shape = (1, sum(row_slice.count for row_slice in slices), loaded.model.config.hidden_size)
        expected = (
            None
            if loaded.stage.is_first
            else communicator.expect_states(shape, loaded.geometry.dtype, loaded.device)
        )
        inputs = build_inputs(slices, self.block_size, loaded.device)
        output = loaded.forward(inputs, expected.wait() if expected else None)
        if not loaded.stage.is_last:
            communicator.send_states(output)
        return output

    def measure_token_ms(self, context: int, vocab_size: int, block_size: int) -> float:
        """ms of one prompt token, over all stages."""
        loaded = self.loaded

        def forward(slices: Sequence[RowSlice]) -> torch.Tensor:
            return loaded.forward(build_inputs(slices, block_size, loaded.device))

        own_ms = warmup.token_ms(forward, context, vocab_size, block_size, loaded.device)
        return self.communicator.all_reduce_sum(int(own_ms * 1e6)) / self.communicator.tp_size / 1e6

    def read(self, batch: MicroBatch) -> float:
        """Take what a micro-batch sampled → ms from its launch to its samples."""
        samples = batch.samples
        if isinstance(samples, Expected):
            samples = unpack_sent_samples(self.communicator.receive_bytes(samples))
        self.take(batch.launched.slices, samples)
        self.collected_step = batch.launched.number
        return (time.monotonic() - batch.launched.started_s) * 1e3
