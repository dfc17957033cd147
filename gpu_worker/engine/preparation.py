"""Preparation of an engine: its layers are compiled, costs of proposals measured, its capacity said."""

from functools import partial

import numpy as np

from common.model_files import Progress
from common.settings.settings import Settings
from gpu_worker.engine.adapters.cache import AdapterCache
from gpu_worker.engine.batch.row import RowSlice
from gpu_worker.engine.batch.split_step import Forward
from gpu_worker.engine.batch.state_slots import StateSlots
from gpu_worker.engine.cuda.compile import compile_layers
from gpu_worker.engine.drafting.acceptance import ProposalCosts, measure_steps
from gpu_worker.engine.drafting.drafter import Drafter
from gpu_worker.engine.model import warmup
from gpu_worker.engine.model.load import name_of
from gpu_worker.engine.model.model import LoadedModel
from gpu_worker.engine.parallel.communicator import Communicator
from gpu_worker.engine.sampling.sampler import sample
from gpu_worker.protocol import Ready


def compile_model(loaded: LoadedModel, forward: Forward, progress: Progress) -> None:
    """Compile the layers of a model whose attention compilers can look into."""
    if not loaded.backend.compilable:
        return
    progress("compiling layers (longer the first time)")
    shape = loaded.vocab_size, loaded.geometry.block_size, loaded.adapters is not None
    compile_layers(loaded.model, loaded.attentions, partial(warmup.run_all_shapes, forward, *shape))


def measure_costs(
    costs: ProposalCosts,
    loaded: LoadedModel,
    forward: Forward,
    drafter: Drafter | None,
    communicator: Communicator,
) -> None:
    """Measure what a proposal costs, sampling included. All ranks go by the times of rank 0."""

    def compute(slices: list[RowSlice]) -> object:
        logits = forward(slices)
        return sample(logits, [None] * len(slices)) if communicator.samples else None

    def measure_ms(num_rows: int) -> float:
        slices = warmup.single_tokens(num_rows, loaded.vocab_size, loaded.geometry.block_size)
        return warmup.fastest_ms(lambda: compute(slices), loaded.device)

    times = [*measure_steps(measure_ms), *(drafter.measure() if drafter else (0.0, 0.0))]
    own = int(communicator.rank == 0)
    costs.set(*(communicator.all_reduce_sum(int(ms * 1e6) * own) / 1e6 for ms in times))


def make_state_slots(loaded: LoadedModel) -> StateSlots | None:
    """Slots of rows and snapshots, none of which is taken; None in a model without states."""
    states, block_size = loaded.states, loaded.geometry.block_size
    return StateSlots(states.num_slots, states.num_snapshots, block_size) if states else None


def capacity_of(
    settings: Settings,
    loaded: LoadedModel,
    token_ms: float,
    adapters: AdapterCache,
    world_size: int,
    prefix_caching: bool,
) -> Ready:
    """The capacity of an engine; `token_ms`: of one prompt token, in a step of many."""
    device = loaded.device
    tokens = settings.max_batch_prefill_tokens or warmup.max_batch_prefill_tokens(token_ms, device)
    return Ready(
        model=settings.model_id,
        dtype=name_of(loaded.geometry.dtype),
        device=device.type,
        block_size=loaded.geometry.block_size,
        num_blocks=loaded.cache.num_blocks,
        max_batch_prefill_tokens=tokens,
        context=loaded.context,
        eos_ids=np.array(loaded.eos_ids, "<i4").tobytes(),
        world_size=world_size,
        token_ms=token_ms,
        prefix_caching=prefix_caching,
        vocab_size=loaded.vector_size or loaded.vocab_size,
        max_loras=len(adapters.slots),
        max_lora_rank=settings.max_lora_rank if loaded.adapters else 0,
        max_cpu_loras=adapters.num_kept,
        pictures=loaded.tower is not None,
        all_pictures=loaded.axis_rope is not None,
        max_rows=loaded.states.num_slots,
        pooling=loaded.pooling.kind if loaded.pooling else "",
    )
