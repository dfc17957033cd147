"""The engine in one process, without a socket: grants in, steps out."""

import logging
import time
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from common.model_files import Progress, no_progress
from common.settings.settings import SettingError, Settings
from gpu_worker.engine.batch.inputs import build_inputs
from gpu_worker.engine.batch.outcome import Int32
from gpu_worker.engine.batch.rows import NO_BLOCKS, Rows, RowSlice
from gpu_worker.engine.cuda.compile import compile_layers, stop_compiling
from gpu_worker.engine.cuda.deterministic import FIXED_TOKENS, FixedShapeGraph
from gpu_worker.engine.cuda.graphs import Capture, CaptureError, CudaGraphs, graph_sizes, make_capture
from gpu_worker.engine.in_flight import InFlightStep, LaunchedStep
from gpu_worker.engine.model import warmup
from gpu_worker.engine.model.load import load, name_of
from gpu_worker.engine.parallel.communicator import SINGLE_RANK, Communicator
from gpu_worker.engine.sampling.multinomial import empty_output
from gpu_worker.engine.sampling.prompt_logprobs import MAX_LOGITS, score_prompts, select_sample_logits
from gpu_worker.engine.sampling.sample import sample
from gpu_worker.engine.split_step import is_out_of_memory, split_step
from gpu_worker.protocol import Grant, Ready, StepResult

log = logging.getLogger(__name__)

NAN = float("nan")


class Engine:
    """Raises SettingError where the settings cannot be served. With `debug_kv` freed blocks are NaN, and zero
    again once granted.
    """

    def __init__(
        self, settings: Settings, progress: Progress = no_progress, communicator: Communicator = SINGLE_RANK
    ) -> None:
        self.communicator = communicator
        self.loaded = load(settings, progress, communicator)
        self.block_size = self.loaded.geometry.block_size
        self.debug_kv = settings.debug_kv
        self.rows = Rows(
            self.block_size,
            self.loaded.eos_ids,
            max(1, MAX_LOGITS // self.loaded.vocab_size),
            self.loaded.recompute_length,
        )
        self.graphs: CudaGraphs | FixedShapeGraph | None = None
        self.runs_ahead = self.loaded.device.type != "cpu"
        self.in_flight: InFlightStep | None = None
        self.collected_step, self.collected_s = 0, 0.0  # the last step read, and when
        if self.loaded.device.type == "cuda":
            self.compile_and_capture(settings, progress)
        progress("measuring its speed")
        self.ready = self.warm_up(settings)

    def compile_and_capture(self, settings: Settings, progress: Progress) -> None:
        """Compiles layers, and captures steps in which all rows decode, where attention allows it; nothing
        of it with ENFORCE_EAGER.
        """
        if settings.enforce_eager:
            return
        loaded = self.loaded
        if loaded.backend.compilable:
            progress("compiling layers (longer the first time)")
            try_out = partial(warmup.run_all_shapes, self.forward, loaded.vocab_size, self.block_size)
            compile_layers(loaded.model, loaded.attentions, try_out)
        if loaded.plan_free:
            progress("capturing CUDA graphs")
            self.try_to_capture(settings)
        stop_compiling()

    def try_to_capture(self, settings: Settings) -> None:
        """Model code that waits for the device within a step cannot be captured: its steps are launched one
        operation after the other.
        """
        try:
            self.capture(make_capture(self.loaded.device), settings.max_batch_size, settings.deterministic)
        except CaptureError as error:
            cause = f"its steps cannot be captured: {error}"
            if settings.deterministic:
                raise SettingError("deterministic", f"{settings.model_id}: {cause}") from error
            log.warning("%s; they are slower", cause)

    def capture(self, capture: Capture, max_rows: int, deterministic: bool) -> None:
        """Makes graphs of steps in which up to `max_rows` rows decode; or of one step through which
        everything goes.
        """
        loaded, size = self.loaded, FIXED_TOKENS if deterministic else max_rows
        max_blocks = min(-(-loaded.context // self.block_size), loaded.cache.num_blocks)
        graphs = CudaGraphs(
            loaded.decode, size, max_blocks, loaded.vocab_size, loaded.geometry.dtype, loaded.device
        )
        graphs.capture(capture, [size] if deterministic else graph_sizes(size))
        self.graphs = FixedShapeGraph(graphs) if deterministic else graphs

    def warm_up(self, settings: Settings) -> Ready:
        loaded = self.loaded
        token_ms = warmup.token_ms(
            self.forward, loaded.context, loaded.vocab_size, self.block_size, loaded.device
        )
        most = warmup.max_prompt_tokens(settings.max_batch_prefill_tokens, loaded.context, loaded.device)
        tokens = settings.max_batch_prefill_tokens or warmup.max_batch_prefill_tokens(token_ms, most)
        return Ready(
            model=settings.model_id,
            dtype=name_of(loaded.geometry.dtype),
            device=loaded.device.type,
            block_size=self.block_size,
            num_blocks=loaded.cache.num_blocks,
            max_batch_prefill_tokens=tokens,
            context=loaded.context,
            eos_ids=np.array(loaded.eos_ids, "<i4").tobytes(),
            world_size=self.communicator.world_size,
            token_ms=token_ms,
        )

    def apply(self, grant: Grant) -> None:
        """Takes a grant. Granted blocks start as zeros: what an earlier row left in slots that are masked
        must not reach the products.
        """
        self.fill(self.rows.apply(grant), 0.0)

    def step(self) -> StepResult | None:
        """Reads one step, if one is in flight or may and can be run; None where nothing happened at all.

        Where the device computes by itself, the forward of the next step is launched before this one is read.
        Its choice is launched after that, while the forward runs: so what rows remember of their tokens is up
        to date.
        """
        in_flight = self.in_flight or self.sample(self.launch())
        following = self.launch(in_flight) if in_flight and self.runs_ahead else None
        duration_ms = self.collect(in_flight) if in_flight else 0.0
        self.in_flight = self.sample(following)
        outcome = self.rows.take_result()
        if not in_flight and not outcome:
            return None
        if self.debug_kv:
            self.fill(outcome.freed, NAN)
        return outcome.build(self.collected_step, duration_ms)

    def launch(self, before: InFlightStep | None = None) -> LaunchedStep | None:
        """The forward of the next step; `before` is in flight."""
        began_s, slices = time.monotonic(), self.rows.launch()
        return (
            LaunchedStep(
                self.rows.step, slices, self.forward(slices, before.ids if before else None), began_s
            )
            if slices
            else None
        )

    def sample(self, launched: LaunchedStep | None) -> InFlightStep | None:
        """What its rows sample: on all ranks what rank 0 does."""
        if launched is None:
            return None
        requests = launched.requests
        logits, slices = launched.logits, launched.slices
        drawn = (
            empty_output(len(requests), 0, self.loaded.device)
            if self.communicator.rank
            else sample(select_sample_logits(logits, slices), requests)
        )
        self.communicator.broadcast_tensor(drawn.ids)
        return InFlightStep(launched, requests, drawn, score_prompts(logits, slices))

    def collect(self, in_flight: InFlightStep) -> float:
        """Takes what a step sampled → its duration in ms: what it adds to that of the step before where they
        overlap.
        """
        sampled = in_flight.read()
        self.rows.collect(
            in_flight.slices, sampled.ids, sampled.logprobs, sampled.top_logprobs, sampled.prompt_logprobs
        )
        began_s, self.collected_s, self.collected_step = (
            max(in_flight.began_s, self.collected_s),
            time.monotonic(),
            in_flight.number,
        )
        return (self.collected_s - began_s) * 1e3

    def forward(self, slices: Sequence[RowSlice], previous: torch.Tensor | None = None) -> torch.Tensor:
        """Arranged parts → logits [wanted, vocabulary]: of each what it wants. Where memory does not suffice
        for all at once, half by half: what a first try wrote into the cache is written again. `previous`:
        int64, what the step in flight samples.
        """
        try:
            return self.compute(slices, previous)
        except RuntimeError as error:
            smaller = split_step(slices)
            if (
                not smaller or not is_out_of_memory(error) or self.communicator.world_size > 1
            ):  # ranks must not fall out of step
                raise
            log.warning(
                "no memory for a step of %d tokens: it is done in halves",
                sum(row_slice.count for row_slice in slices),
            )
        torch.cuda.empty_cache()
        return torch.cat(
            [self.forward(half, previous).clone() for half in smaller]
        )  # graphs write all into the same place

    @torch.inference_mode()
    def compute(self, slices: Sequence[RowSlice], previous: torch.Tensor | None) -> torch.Tensor:
        """`forward`, all at once."""
        if self.graphs and self.graphs.hold(slices, previous):
            return self.graphs.run(slices, previous)
        return self.loaded.forward(build_inputs(slices, self.block_size, self.loaded.device, previous))

    @torch.inference_mode()
    def fill(self, blocks: Sequence[Int32], value: float) -> None:
        numbers = np.concatenate((NO_BLOCKS, *blocks)).tolist()
        if numbers:
            self.loaded.cache.fill(numbers, value)
