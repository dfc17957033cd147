"""The engine of an encoder: grants in, step results out, as the engine of a decoder (engine.py).

A step computes whole prompts, as many as its budget of tokens has room for. There is no KV cache: blocks hold
nothing, and bound the tokens of the rows that the engine holds.
"""

import logging
import time
from collections.abc import Sequence

import numpy as np
import torch

from common.model_files import Progress
from common.settings.settings import Settings
from gpu_worker.engine.batch.row import RowSlice
from gpu_worker.engine.batch.rows import Rows
from gpu_worker.engine.encoder.model import EncoderModel
from gpu_worker.engine.model import warmup
from gpu_worker.engine.model.load import BLOCK_SIZES, name_of
from gpu_worker.engine.sampling.logprobs import CopiedLogits
from gpu_worker.engine.side_threads import SideThreads
from gpu_worker.protocol import (
    AdapterAnswer,
    AdapterRefused,
    AdapterUnloaded,
    Command,
    Grant,
    LoadAdapter,
    Ready,
    StepResult,
    UnloadAdapter,
)

log = logging.getLogger(__name__)

Computed = list[tuple[RowSlice, CopiedLogits]]


class EncoderEngine:
    """Runs steps of the rows that grants start.

    Attributes:
        collected_step: the last step computed.
    """

    def __init__(self, settings: Settings, progress: Progress, loaded: EncoderModel) -> None:
        self.loaded = loaded
        block_size = settings.block_size or BLOCK_SIZES[loaded.device.type]
        self.block_size = block_size
        self.rows = Rows(block_size=block_size, eos_ids=(), computes_whole=True)
        self.side_threads = SideThreads()
        self.collected_step = 0
        progress("measuring its speed")
        self.ready = self.warm_up(settings)

    def warm_up(self, settings: Settings) -> Ready:
        """Measure the speed → the engine's capacity."""
        loaded, block_size, context = self.loaded, self.rows.block_size, self.loaded.pooling.max_tokens
        token_ms = warmup.token_ms(self.try_out, context, 2, block_size, loaded.device)
        tokens = settings.max_batch_prefill_tokens or warmup.max_batch_prefill_tokens(token_ms, loaded.device)
        return Ready(
            model=settings.model_id,
            dtype=name_of(loaded.dtype),
            device=loaded.device.type,
            block_size=block_size,
            num_blocks=settings.max_batch_size * -(-context // block_size),
            max_batch_prefill_tokens=tokens,
            context=context,
            eos_ids=b"",
            token_ms=token_ms,
            vocab_size=loaded.size,
            pooling=loaded.pooling.kind,
        )

    def try_out(self, slices: Sequence[RowSlice]) -> torch.Tensor:
        """Compute prompts that belong to no row → their vectors, float32 [sequences, size]."""
        return self.vectors(slices)

    # --- what the loop calls --------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Do nothing: there is nothing to prepare while no row is held."""

    def slack_s(self) -> float:
        """How long the next step may wait for grants: not at all, since none is in flight."""
        return 0.0

    def apply(self, grant: Grant) -> None:
        """Apply a grant. Blocks hold nothing, so none are filled."""
        self.rows.apply(grant)

    def obey(self, command: Command) -> AdapterAnswer | None:
        """Obey a command → the answer to the agent, if it has one."""
        match command:
            case Grant():
                self.apply(command)
                return None
            case UnloadAdapter():
                return AdapterUnloaded(command.name)
            case LoadAdapter():
                return AdapterRefused(command.name, "an encoder takes no adapters")

    def sleep(self) -> None:
        """Give up the memory of a GPU. No row is held."""
        self.loaded.move(torch.device("cpu"))

    def wake_up(self, progress: Progress) -> Ready:
        """Be again what `sleep` has left → the engine's capacity."""
        self.loaded.move(self.loaded.device)
        return self.ready

    def step(self) -> StepResult | None:
        """Compute a step → its result; None if no step could run and no row ended."""
        started_s = time.monotonic()
        slices = self.rows.launch()
        computed = self.compute(slices) if slices else []
        done = [row_slice for row_slice, _ in computed]
        if len(done) < len(slices):
            self.rows.fail(slices, done)
        self.rows.collect(done, (), ())
        self.rows.result.logits += [piece for _, copied in computed for piece in copied.pieces()]
        self.collected_step = self.rows.step
        result = self.rows.take_result()
        if not slices and not result:
            return None
        return result.build(self.collected_step, (time.monotonic() - started_s) * 1e3 if done else 0.0)

    # --- vectors --------------------------------------------------------------------------------------------

    def compute(self, slices: Sequence[RowSlice]) -> Computed:
        """The values of each prompt; a prompt for which the forward raises is left out. A step that fails is
        computed as two halves. Raises what the forward raises if it does so for any prompt.
        """
        try:
            return self.values(slices)
        except Exception as error:
            if len(slices) > 1:
                middle = len(slices) // 2
                return self.compute(slices[:middle]) + self.compute(slices[middle:])
            log.error("the forward failed for a row: %s", error)
            try:
                self.try_out(warmup.prompt_parts(1, 1, 2, self.rows.block_size))
            except Exception:
                raise error from None
            return []

    def values(self, slices: Sequence[RowSlice]) -> Computed:
        """What each row returns: its vector, at the last position."""
        in_order = sorted(
            slices, key=lambda row_slice: row_slice.count
        )  # neighbours of one length are one call
        vectors = self.vectors(in_order).cpu()
        return [
            (row_slice, CopiedLogits(row_slice.row.number, row_slice.count - 1, vectors[place : place + 1]))
            for place, row_slice in enumerate(in_order)
        ]

    @torch.inference_mode()
    def vectors(self, slices: Sequence[RowSlice]) -> torch.Tensor:
        """Vectors float32 [sequences, size]."""
        lengths, device = [row_slice.count for row_slice in slices], self.loaded.device
        ids = np.concatenate([row_slice.row.ids for row_slice in slices]).astype(np.int64)
        types = np.concatenate([token_types(row_slice) for row_slice in slices])
        states = self.loaded.states(
            torch.from_numpy(ids).to(device), lengths, torch.from_numpy(types).to(device)
        )
        return self.loaded.pool(states, lengths)


def token_types(row_slice: RowSlice) -> np.typing.NDArray[np.int64]:
    """int64 [tokens]: 1 for tokens of a pair's second text, else 0."""
    pooling = row_slice.row.pooling
    start = (pooling.pair_start if pooling else 0) or row_slice.count
    return (np.arange(row_slice.count) >= start).astype(np.int64)
