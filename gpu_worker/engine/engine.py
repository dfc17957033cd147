"""The engine of one process, without a socket: grants in, step results out. Its steps in flight, which are
launched on the device and not yet read by the host, and the pace of launches.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter

import msgpack
import numpy as np
import torch

from common.messages.plan import Plan, WorkerCapacity
from common.model_files import Progress, no_progress
from common.settings.settings import SettingError, Settings
from gpu_worker.engine.adapters import AdapterCache
from gpu_worker.engine.batch.beams import (
    Copies,
    SearchStep,
    candidates_of,
    score_beams,
    search_steps,
    text_factory,
)
from gpu_worker.engine.batch.inputs import build_inputs
from gpu_worker.engine.batch.row import StepPart, StepSlices, request_at
from gpu_worker.engine.batch.rows import NO_BLOCKS, Rows
from gpu_worker.engine.batch.sampling_state import SampleRequest
from gpu_worker.engine.batch.split_step import forward_in_halves
from gpu_worker.engine.batch.state_slots import StateSlots
from gpu_worker.engine.batch.step_result import Int32, PromptLogprobs, StepSamples, TopLogprobs
from gpu_worker.engine.cuda.graphs import (
    Capture,
    CaptureError,
    CudaGraphs,
    compile_layers,
    make_capture,
    stop_compiling,
)
from gpu_worker.engine.drafting.load_draft import load_draft, make_drafter
from gpu_worker.engine.drafting.proposers import ProposalCosts, proposer_factory
from gpu_worker.engine.model import warmup
from gpu_worker.engine.model.load import load, name_of, threads_of
from gpu_worker.engine.model.model import LoadedModel
from gpu_worker.engine.model.vision import make_encoder
from gpu_worker.engine.parallel.communicator import SAMPLES, SINGLE_RANK, Communicator
from gpu_worker.engine.sampling.grammar import Matchers
from gpu_worker.engine.sampling.sampler import (
    MAX_LOGITS,
    CopiedLogits,
    KeptArguments,
    SamplerOutput,
    copy_logits,
    empty_output,
    sample,
    score_prompts,
    select_sample_logits,
)
from gpu_worker.engine.side_threads import SideThreads
from gpu_worker.protocol import AdapterAnswer, Command, StepResult

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


SAMPLING_STATE = attrgetter("sampling_state")


def sample_requests(slices: StepSlices) -> list[SampleRequest | None]:
    """The requests of the rows that sample, once the host has read the step before; None for greedy samples
    and for those that are dropped.
    """
    requests: list[SampleRequest | None] = [None] * len(slices.rows)
    if any(states := [*map(SAMPLING_STATE, slices.rows)]):
        requests = [*map(request_at, states, slices.indices.tolist())]
    for row_slice in slices.others:
        row = row_slice.row
        if row.sampling_state is None or row.ended or row_slice.num_returns != row.num_returns:
            requests += [None] * row_slice.num_samples
        else:
            requests += row_slice.sample_requests
    return requests


def not_sampled() -> StepSamples:
    raise RuntimeError("the sampling of the step is not launched")


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """A step whose forward was launched; then its sampling, too: its tokens are being copied to the host, or
    sent by the rank that samples.

    Attributes:
        number: number of the step.
        logits: float [num_logits, vocabulary]; on CUDA they may still be computed.
        started_s: monotonic time.
        read: waits for the step → what it sampled. Here alone the host waits for the device within a step.
        ids: int64 [rows], on the device; None in a pipeline.
        copied: the copies are done; None on CPU.
    """

    number: int
    slices: StepSlices
    logits: torch.Tensor
    started_s: float
    read: Callable[[], StepSamples] = not_sampled
    ids: torch.Tensor | None = None
    copied: torch.cuda.Event | None = None

    @property
    def is_unsure(self) -> bool:
        """Whether the next step can be launched only once this one is read."""
        return any(one.row.output.is_unsure(one) for one in self.slices.others)

    @property
    def is_done(self) -> bool:
        """Whether the device has computed it; always False on CPU."""
        return bool(self.copied and self.copied.query())  # type: ignore[no-untyped-call]


def copy_step(
    step: InFlightStep,
    requests: Sequence[SampleRequest | None],
    output: SamplerOutput,
    prompts: Sequence[SamplerOutput],
    logits: Sequence[CopiedLogits] = (),
    searches: Sequence[SearchStep] = (),
    beams: torch.Tensor | None = None,
) -> InFlightStep:
    """Queue the copies of what a step sampled to the host. `logits`: those that rows return; `beams` float64
    [4, continuations] of `searches`.
    """
    on_host, scored = copy_to_host(output), [copy_to_host(prompt) for prompt in prompts]
    found = None if beams is None else beams.to("cpu", non_blocking=True)
    copied = torch.cuda.Event() if output.ids.is_cuda else None  # type: ignore[no-untyped-call]
    if copied:
        copied.record()

    def read() -> StepSamples:
        if copied:
            copied.synchronize()
        samples = unpack_samples(on_host, requests, [*map(pack_logprobs, scored)])
        pieces = [piece for one in logits for piece in one.pieces()]
        candidates = {} if found is None else candidates_of(searches, found)
        return replace(samples, candidates=candidates, logits=pieces)

    return replace(step, read=read, ids=output.ids, copied=copied)


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
    tops = {
        place: TopLogprobs(top_ids[place][:count], top_logprobs[place][:count])
        for place, request in enumerate(requests if output.top_ids.shape[1] else ())
        if request and (count := request.state.top_n_tokens)
    }
    return StepSamples(ids, logprobs, tops, list(prompt_logprobs))


def pack_logprobs(output: SamplerOutput) -> PromptLogprobs:
    """Pack columns on the host, logprobs float32 [tokens] and top [tokens, n]."""
    columns = (output.logprobs.float(), output.top_ids.int(), output.top_logprobs.float())
    return PromptLogprobs(*(column.numpy().tobytes() for column in columns))


log = logging.getLogger(__name__)
NAN = float("nan")


class Engine:
    """Runs steps of the rows that grants start. Loads the model if `loaded` is None.

    Of a pipeline it runs one stage's part of each step (arXiv:1811.06965). All ranks launch the same steps in
    the same order: as many are in flight as there are stages, so a stage computes one while the others
    compute those before and after it. The last stage samples, and sends what it sampled to all ranks.

    Raises SettingError if the settings cannot be served. With `debug_kv` freed blocks are filled with NaN,
    and with zeros once they are granted.

    Attributes:
        runs_ahead: the next step is launched before the last one is read, unless that one `is_unsure`; not
            on CPU, nor in stages, which have several steps in flight.
        in_flight: the steps that are launched and not read, oldest first.
        collected_step: the last step read.
        adapters: LoRA adapters that rows may have.
        kept: what the sampler has made of the last step's rows.
        parts: what else a step has.
    """

    def __init__(
        self,
        settings: Settings,
        progress: Progress = no_progress,
        communicator: Communicator = SINGLE_RANK,
        loaded: LoadedModel | None = None,
    ) -> None:
        self.settings = settings
        self.communicator = communicator
        torch.set_num_threads(settings.threads or threads_of(settings, communicator))
        self.loaded = loaded = loaded or load(settings, progress, communicator, load_draft)
        self.block_size = loaded.geometry.block_size
        self.side_threads = SideThreads()
        self.matchers = Matchers(
            *(loaded.tokenizer, loaded.vocab_size, loaded.eos_ids),
            waits=communicator.world_size > 1,
            side_threads=self.side_threads,
        )
        self.prefix_caching = settings.prefix_caching and loaded.can_share_blocks
        self.adapters = AdapterCache(loaded.adapters, settings, communicator)
        self.costs = ProposalCosts()
        self.drafter = make_drafter(loaded, self.matchers)
        drafted = (loaded.draft.method, loaded.draft.num_tokens) if loaded.draft else ()
        propose = proposer_factory(settings.speculation, self.costs, *drafted)
        self.rows = Rows(
            block_size=self.block_size,
            eos_ids=loaded.eos_ids,
            make_grammar=self.matchers.start,
            max_scored_tokens=max(1, MAX_LOGITS // loaded.vocab_size),
            recompute_length=loaded.recompute_length,
            prefix_caching=self.prefix_caching,
            make_proposer=None if loaded.states else propose,
            max_decoded=warmup.max_decoded_tokens(settings.max_batch_size),
            num_micro_batches=communicator.num_stages,
            make_text=text_factory(loaded.tokenizer),
            adapters=self.adapters.known,
            max_adapters=settings.max_loras,
            state_slots=StateSlots(loaded.states, self.block_size) if loaded.states else None,
            computes_whole=loaded.is_encoder,
            on_freed=self.spoil if settings.debug_kv else None,
        )
        if loaded.states and settings.speculation:
            log.warning("SPECULATE is off: states of rows cannot go back from wrong proposals")
        self.graphs: CudaGraphs | None = None
        self.runs_ahead = loaded.device.type != "cpu" and communicator.num_stages == 1
        self.in_flight = deque[InFlightStep]()
        self.collected_step = 0
        self.kept = KeptArguments()
        self.pace = LaunchPace()
        self.ready = self.warm_up(progress)
        self.pictures = make_encoder(loaded, self.ready.token_ms, self.side_threads)
        if self.pictures:
            self.rows.make_pictures = self.pictures.start
        adapters = self.adapters if loaded.adapters else None
        beams = Copies(lambda copies: loaded.cache.copy(copies), self.rows.copies)
        parts = (self.pictures, self.drafter, adapters, beams, self.rows.state_slots)
        self.parts: list[StepPart] = [part for part in parts if part]

    def warm_up(self, progress: Progress) -> WorkerCapacity:
        """Compile and capture steps on CUDA, and measure the speed → the engine's capacity."""
        settings, loaded, communicator = self.settings, self.loaded, self.communicator
        if loaded.device.type == "cuda":
            self.compile_and_capture(progress)
        progress("measuring its speed")
        if (settings.speculation or self.drafter) and not loaded.pooling:
            self.measure_costs()
        # of a prompt token: in all stages together
        token_ms = sum(communicator.exchange(warmup.token_ms(loaded))) / communicator.tp_size
        measured = warmup.max_batch_prefill_tokens(token_ms, loaded.device)
        return WorkerCapacity(
            incarnation="",
            name="",
            model=settings.model_id,
            dtype=name_of(loaded.geometry.dtype),
            device=loaded.device.type,
            block_size=self.block_size,
            num_blocks=loaded.cache.num_blocks,
            max_batch_prefill_tokens=settings.max_batch_prefill_tokens or measured,
            context=loaded.context,
            eos_ids=np.array(loaded.eos_ids, "<i4").tobytes(),
            world_size=communicator.world_size,
            token_ms=token_ms,
            prefix_caching=self.prefix_caching,
            vocab_size=loaded.pooling.size if loaded.pooling else loaded.vocab_size,
            max_loras=self.adapters.num_slots,
            max_lora_rank=settings.max_lora_rank if loaded.adapters else 0,
            pictures=loaded.tower is not None,
            all_pictures=loaded.axis_rope is not None,
            max_rows=loaded.states.num_slots,
            pooling=loaded.pooling.kind if loaded.pooling else "",
        )

    def measure_costs(self) -> None:
        """Measure what a proposal costs, sampling included. All ranks go by the times of rank 0."""
        loaded, communicator, drafter = self.loaded, self.communicator, self.drafter

        def step(num_rows: int) -> Callable[[], object]:
            slices, requests = warmup.prompt_parts(loaded, *[1] * num_rows), [None] * num_rows
            return lambda: (logits := self.forward(slices), communicator.samples and sample(logits, requests))

        step_ms = warmup.measure_steps(step, loaded.device)  # heads have seen states then
        draft_ms = warmup.measure_steps(drafter.trial, loaded.device) if drafter else (0.0, 0.0)
        self.costs.set(*communicator.exchange([*step_ms, *draft_ms])[0])

    def compile_and_capture(self, progress: Progress) -> None:
        """Compile layers whose attention compilers can look into, and capture steps. With ENFORCE_EAGER only
        run all shapes, so that kernels which attention compiles at their first use do not keep rows waiting.
        """
        loaded, is_eager = self.loaded, self.settings.enforce_eager
        if loaded.backend.compilable:
            progress("compiling kernels and layers (longer the first time)")
            run_all_shapes = partial(warmup.run_all_shapes, loaded, self.forward)
            run_all_shapes() if is_eager else compile_layers(loaded.model, loaded.layers, run_all_shapes)
        if is_eager:
            return
        self.try_to_capture(progress)
        stop_compiling()

    def try_to_capture(self, progress: Progress) -> None:
        """Capture graphs where attention allows it. If the model's code waits for the device within a step,
        the operations of a step are launched one by one. Raises SettingError if DETERMINISTIC needs graphs.
        """
        settings = self.settings
        if settings.enforce_eager or not self.loaded.capturable:
            return
        progress("capturing CUDA graphs")
        try:
            self.capture(make_capture(self.loaded.device), settings.max_batch_size, settings.deterministic)
        except CaptureError as error:
            cause = f"its steps cannot be captured: {error}"
            if settings.deterministic:
                raise SettingError("deterministic", f"{settings.model_id}: {cause}") from error
            log.warning("%s; they are slower", cause)

    def capture(self, capture: Capture, max_rows: int, deterministic: bool) -> None:
        """Capture steps of few tokens; with `deterministic` one of a fixed shape."""
        graphs = warmup.capture_steps(self.loaded, capture, max_rows, deterministic)
        if self.drafter:
            graphs.takes_prompts = False
            self.drafter.capture(capture, max_rows)
        self.graphs = graphs

    def prepare(self) -> None:
        """Prepare for grammars while no row is held; rows that pool have none."""
        if not self.loaded.pooling:
            self.matchers.prepare()

    def sleep(self) -> None:
        """Give up the cache, the graphs and, on a GPU, the weights' memory there. No row is held."""
        while self.in_flight:
            self.step()
        self.graphs = None
        for part in self.parts:
            part.sleep()
        self.loaded.sleep()

    def wake_up(self, progress: Progress) -> WorkerCapacity:
        """Be again what `sleep` has left → the engine's capacity. Raises MemoryError."""
        self.loaded.wake_up()
        if self.loaded.device.type == "cuda":
            self.try_to_capture(progress)
        self.ready = replace(self.ready, num_blocks=self.loaded.cache.num_blocks)
        return self.ready

    def obey(self, command: Command) -> AdapterAnswer | None:
        """Obey a command → the answer to the agent, if it has one."""
        if isinstance(command, Plan):
            self.apply(command)
            return None
        in_use = (row.adapter for row in self.rows.rows.values() if row.adapter)
        return self.adapters.obey(command, in_use)

    def apply(self, plan: Plan) -> None:
        """Apply a plan. Granted blocks start as zeros: no earlier row's values may reach the products."""
        granted = self.rows.apply(plan)
        self.fill(granted, 0.0)
        for part in self.parts:
            part.granted(granted)

    def slack_s(self) -> float:
        """How long the next launch may wait for grants; several ranks do not wait, since they launch
        together.
        """
        waits = self.in_flight and self.communicator.world_size == 1
        return self.pace.slack_s(time.monotonic()) if waits else 0.0

    def step(self) -> StepResult | None:
        """Run and read one step → its result; None if no step could run and no row ended.

        On a GPU the forward of the next step is launched before this step is read. The next step's sampling
        is launched after that, while its forward runs: then the rows' sampling states know the tokens just
        read.
        """
        while len(self.in_flight) < self.rows.num_micro_batches and (launched := self.launch()):
            self.in_flight.append(self.sample(launched))
        oldest = self.in_flight.popleft() if self.in_flight else None
        following = None
        if oldest and self.runs_ahead and not oldest.is_unsure:
            following = self.launch(oldest)
        duration_ms = self.collect(oldest) if oldest else 0.0
        if following:
            self.in_flight.append(self.sample(following))
        return self.take_result(oldest is not None, duration_ms)

    def take_result(self, is_step: bool, duration_ms: float) -> StepResult | None:
        """What happened since the last call; None if that was no step, and no row ended."""
        result = self.rows.take_result()
        if not is_step and result.is_empty:
            return None
        result.step, result.duration_ms = self.collected_step, duration_ms
        return result

    def spoil(self, blocks: Int32, slots: Sequence[int]) -> None:
        """Fill what a row has released with NaN."""
        self.fill([blocks], NAN)
        self.loaded.states.fill(slots, NAN)

    def launch(self, before: InFlightStep | None = None) -> InFlightStep | None:
        """Launch the forward of the next step, if one can run; `before` is in flight."""
        started_s = time.monotonic()
        self.costs.num_rows = len(self.rows.rows) or 1
        for part in self.parts:
            part.before(self.rows)
        slices = self.rows.launch()
        for part in self.parts:
            able = part.prepare(self.rows, slices)
            if len(able) < len(slices):
                slices = self.rows.fail(slices, able, part.failure)
        if not slices:
            return None
        if before:
            self.pace.on_launch(before.is_done)
        elif self.communicator.samples:
            awaited = StepSlices([part for part in slices.others if part.row.awaited])
            self.matchers.start_masks(sample_requests(awaited))
        slices, logits = self.forward_able(slices, before.ids if before else None)
        for part in self.parts:
            part.after(self.rows, slices)
        return InFlightStep(self.rows.step, slices, logits, started_s) if slices else None

    def sample(self, launched: InFlightStep) -> InFlightStep:
        """Launch the sampling of a step. One rank samples, and the others take its tokens. In a pipeline they
        wait for its bytes when they read the step; it reads the step itself at once.
        """
        communicator, slices = self.communicator, launched.slices
        if communicator.num_stages > 1 and not communicator.samples:
            expected = communicator.expect_bytes(communicator.sampler, SAMPLES)
            return replace(
                launched, read=lambda: StepSamples(*msgpack.unpackb(expected(), strict_map_key=False))
            )
        logits = launched.logits
        requests, sampled = sample_requests(slices), select_sample_logits(logits, slices)
        if communicator.samples:
            self.matchers.finish_masks(requests)
        output = (
            sample(sampled, requests, self.kept)
            if communicator.samples
            else empty_output(len(requests), 0, self.loaded.device)
        )
        communicator.share(output.ids)
        copied = copy_logits(logits, slices) if communicator.samples else []
        searches = [*search_steps(slices, self.loaded.vocab_size)]
        beams = score_beams(sampled, requests, searches, communicator.samples) if searches else None
        if beams is not None:
            communicator.share(beams)
        step = copy_step(launched, requests, output, score_prompts(logits, slices), copied, searches, beams)
        if communicator.num_stages == 1:
            return step
        samples = step.read()
        fields = [getattr(samples, name) for name in StepSamples.__slots__]
        communicator.send_to_all(msgpack.packb(fields), SAMPLES)
        return replace(launched, read=lambda: samples)

    def collect(self, step: InFlightStep) -> float:
        """Read a step → its duration in ms; in a pipeline, in all stages."""
        self.rows.collect(step.slices, step.read())
        self.collected_step = step.number
        if self.communicator.num_stages > 1:
            return (time.monotonic() - step.started_s) * 1e3
        return self.pace.on_read(step.started_s, time.monotonic(), self.rows.result.prefill_tokens) * 1e3

    def forward_able(
        self, slices: StepSlices, previous: torch.Tensor | None
    ) -> tuple[StepSlices, torch.Tensor]:
        """`forward`, in halves if it raises, and without the rows for which it raises again: they fail → the
        slices that are computed, and their logits. `previous` int64 [rows]. With several ranks the worker
        ends, since the others may wait for this rank within a sum.
        """
        try:
            return slices, self.forward(slices, previous)
        except Exception as error:
            if self.communicator.world_size > 1:
                raise
            trial = warmup.prompt_parts(self.loaded, 1)
            forward = partial(self.forward, previous=previous)
            computed, logits = forward_in_halves(forward, slices, trial, error)
        return self.rows.fail(slices, computed), logits

    @torch.inference_mode()
    def forward(self, slices: StepSlices, previous: torch.Tensor | None = None) -> torch.Tensor:
        """Arranged slices → logits float [num_logits, vocabulary]. `previous` int64 [rows]: ids that the step
        in flight samples. In a stage before the last hidden states [1, tokens, hidden], which go to the next
        stage.
        """
        loaded, communicator = self.loaded, self.communicator
        if self.graphs and self.graphs.can_run(slices, previous):
            output = self.graphs.run(slices, previous)
        else:
            expected = None
            if not loaded.stage.is_first:
                shape = (1, slices.num_tokens, loaded.model.config.hidden_size)
                expected = communicator.expect_states(shape, loaded.geometry.dtype, loaded.device)
            inputs = build_inputs(slices, self.block_size, loaded.device, previous)
            output = loaded.forward(inputs, expected() if expected else None)
        if not loaded.stage.is_last:
            communicator.send_states(output)
        if self.drafter:
            self.drafter.on_forward(slices)
        return output

    @torch.inference_mode()
    def fill(self, blocks: Sequence[Int32], value: float) -> None:
        if numbers := np.concatenate((NO_BLOCKS, *blocks)).tolist():
            self.loaded.fill(numbers, value)
