"""Compiled layers, and captured steps.

torch compiles decoder layers, each by itself: one compilation serves all layers that are alike.

CUDA graphs of steps with few tokens: the host launches a step at once, not operation by operation, which
would take it about a millisecond a layer. A token of a prompt is computed there as a row that decodes.

With DETERMINISTIC one graph of a fixed shape computes all steps. What a product, a norm or attention makes
of a row depends on shapes, which decide how sums are split, not on the other rows. So with one shape a
token's bits are the same in any batch, chunk or resume. XQA splits rows by their number, the heads and the
width of the table, all fixed by the graph.
"""

import logging
import os
import re
import tempfile
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain, repeat
from operator import attrgetter, is_
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from common.process.machine import make_cache_folder
from gpu_worker.engine.batch.inputs import (
    NO_TOKENS,
    adapted_step,
    fill_pending_ids,
    logit_positions,
    positions_of,
    rotary_positions,
    to_device,
    token_ids,
)
from gpu_worker.engine.batch.row import StepSlices
from gpu_worker.engine.batch.step_result import Int32
from gpu_worker.engine.model.model import LoadedModel
from gpu_worker.protocol import first_line

FIXED_TOKENS = 256
"""Tokens of the graph with DETERMINISTIC. As far as reading weights from memory takes the time, a step of so
many takes about twice as long as one of a single token.
"""

FEW_TOKENS = 64
"""Between sizes of graphs for more tokens than there may be rows."""
MAX_SEEN_TOKENS = 2**19
"""Tokens that all tokens of a step with prompts may see together. There each reads its keys by itself: beyond
that launching operations takes less time.
"""


Replay = Callable[[], None]
Capture = Callable[[Replay], Replay]
"""Captures what a function launches → a function that replays it."""


PLAIN, SPLIT, ADAPTED = VARIANTS = ("plain", "split", "adapted")
"""Of steps, of those whose rows are split for the sake of a long one, and of those with LoRA adapters."""


class CaptureError(Exception):
    """A step cannot be captured: it waits for the device."""


def graph_sizes(max_rows: int, max_tokens: int) -> list[int]:
    """Numbers of tokens for which a graph is captured. A step runs in the smallest graph with room for all
    its tokens. Steps beyond `max_rows` have proposals or prompts, and are rarer: few sizes are enough.
    """
    sizes = {min(size, max_rows) for size in (1, 2, 4, *range(8, max_rows + 8, 8))}
    while (largest := max(sizes)) < max_tokens:
        sizes.add(min(largest + min(largest, FEW_TOKENS), max_tokens))
    return sorted(sizes)


class CudaGraphs:
    """Graphs by number of rows and variant. They read and write tensors at fixed places: a step's inputs
    are copied there. A proposal counts as a row here, as in batch/inputs.py, and so does each token of a
    prompt.

    Attributes:
        is_fixed: one graph computes all steps, in chunks of its size. K and V of a chunk are written before
            attention reads them: a token sees those before it in its own chunk, too.
        takes_prompts: steps with prompts may run here, too. Not in models with states, whose tokens follow
            each other, or whose positions depend on the length of the prompt; and not if heads draft by the
            hidden states of prompts.
        ids: int32 [max_rows]; ids below 0 are sampled by the step in flight, as in batch/inputs.py.
        positions: int32 [max_rows]
        rotary: int32 [max_rows]; the positions by which queries and keys are turned: after pictures they may
            be smaller.
        table: int32 [max_rows, max_blocks]; the rows' blocks.
        slots: int32 [max_rows]; the rows' slots of states.
        graphs: by number of rows, in order, and variant: replays a step; `sizes`: these numbers, by variant.
        tabled: the blocks that the first lines of `table` have, and the size of the step that left them.
        previous: int64 [max_samples]; ids that the step in flight samples.
        logits: [max_rows, vocabulary] of the model's dtype.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        max_rows: int,
        max_blocks: int,
        max_samples: int | None = None,
        is_fixed: bool = False,
    ) -> None:
        self.loaded = loaded
        self.is_fixed = is_fixed
        self.takes_prompts = loaded.computes_tokens_alone
        self.device = device = loaded.device
        self.ids, self.positions, self.rotary, self.slots = (
            torch.zeros(max_rows, dtype=torch.int32, device=device) for _ in range(4)
        )
        self.table = torch.zeros(max_rows, max_blocks, dtype=torch.int32, device=device)
        self.previous = torch.zeros(max_samples or max_rows, dtype=torch.int64, device=device)
        self.logits = torch.zeros(max_rows, loaded.vocab_size, dtype=loaded.geometry.dtype, device=device)
        self.tabled: tuple[int, list[Int32]] = (0, [])
        self.graphs: dict[tuple[int, str], Replay] = {}
        self.sizes: dict[str, list[int]] = {}

    def capture(self, capture: Capture, sizes: Sequence[int], longest: int = 1) -> None:
        """Capture the largest size first: the others share its memory. If rows of up to `longest` tokens are
        split, steps of split rows are captured, too, in few sizes.
        """
        for size in sorted(sizes, reverse=True):
            self.loaded.plan_decode(np.zeros(size, np.int32), np.zeros((size, 1), np.int32))
            skewed, adapters = np.array([longest, *[1] * (size - 1)], np.int32), self.loaded.adapters
            is_few = size & (size - 1) == 0 or size == max(sizes)  # steps of split rows are rare
            are_captured = {
                PLAIN: True,
                SPLIT: is_few and self.loaded.backend.splits_rows(skewed),
                ADAPTED: adapters is not None and adapters.capturable,
            }
            for variant in filter(are_captured.__getitem__, VARIANTS):
                self.loaded.set_adapters(NO_TOKENS if variant == ADAPTED else None)
                self.graphs[size, variant] = capture(partial(self.forward, size, variant == SPLIT))
        self.graphs = dict(sorted(self.graphs.items()))
        self.sizes = {own: [size for size, other in self.graphs if other == own] for own in VARIANTS}

    def size_of(self, rows: int, variant: str) -> int:
        """The smallest size of a variant that has room for so many rows; 0 if none has."""
        sizes = self.sizes[variant]
        place = bisect_left(sizes, rows)
        return sizes[place] if place < len(sizes) else 0

    def forward(self, size: int, is_split: bool) -> None:
        ids = fill_pending_ids(self.ids[:size].long(), self.previous)
        inputs = ids[None], self.positions[:size], self.table[:size]
        own = self.rotary[:size], self.slots[:size]
        self.logits[:size].copy_(self.loaded.decode(*inputs, is_split, *own))

    def can_run(self, slices: StepSlices, previous: torch.Tensor | None) -> bool:
        """Whether a graph has room for all tokens. Slices are arranged: rows that decode come first."""
        if self.is_fixed:
            return True
        rows = max(slices.num_tokens, 0 if previous is None else len(previous))
        takes_adapters = self.loaded.adapters is None or self.size_of(1, ADAPTED)
        others = slices.others
        if not takes_adapters and any(row_slice.row.adapter for row_slice in others):
            return False
        if not self.size_of(rows, PLAIN):
            return False
        if not slices.has_prompts or not self.takes_prompts:
            return not slices.has_prompts
        needs_more = any(row_slice.row.pictures or row_slice.row.adapter for row_slice in others)
        seen = sum(row_slice.count * row_slice.kv_len for row_slice in slices)
        return not needs_more and seen <= MAX_SEEN_TOKENS

    def run(self, slices: StepSlices, previous: torch.Tensor | None) -> torch.Tensor:
        """Launch a step → logits [num_logits, vocabulary], which the next step overwrites. `previous`: ids
        that the step in flight samples.
        """
        positions = positions_of(slices).astype(np.int32)
        rows = len(positions)
        adapters = adapted_step(slices) if self.loaded.adapters else None
        self.loaded.set_adapters(adapters)
        is_split = self.size_of(rows, SPLIT) and self.loaded.backend.splits_rows(positions + 1)
        variant = ADAPTED if adapters else SPLIT if is_split else PLAIN
        size = len(self.ids) if self.is_fixed else self.size_of(rows, variant)
        blocks = blocks_of(slices)
        stay = self.loaded.backend.plan_free and self.tabled[0] == size and are_same(blocks, self.tabled[1])
        chunks = range(0, rows, size)
        used = () if stay and len(chunks) == 1 else blocks
        inputs = self.inputs_of(slices, positions, len(chunks) * size, used)
        self.tabled = size, blocks
        if previous is not None:
            self.previous[: len(previous)].copy_(previous)
        places = None if len(chunks) == 1 and not slices.has_prompts else logit_positions(slices)
        logits = []
        for begin in chunks:
            self.copy_inputs(inputs[:, begin : begin + size], size)
            self.graphs[size, variant]()
            if places is None:
                logits.append(self.logits[:rows])
            else:
                inside = places[(places >= begin) & (places < begin + size)] - begin
                logits.append(self.logits.index_select(0, to_device(inside, self.device)))
        if adapters:
            self.loaded.set_adapters(None)
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    def inputs_of(self, slices: StepSlices, positions: Int32, size: int, blocks: Sequence[Int32]) -> Int32:
        """positions int32 [tokens], blocks of each token int32 [blocks] → int32 [4 + blocks, size]: ids,
        positions, those that turn queries and keys, slots of states, and the rows' blocks, a column for each
        token. Without blocks the table stays as it is.
        """
        tokens, lengths = len(positions), np.array([*map(len, blocks)], np.int64)
        inputs = np.zeros((4 + int(lengths.max(initial=0)), size), np.int32)
        turned = rotary_positions(slices, positions) if self.loaded.axis_rope else positions
        inputs[:3, :tokens] = token_ids(slices), positions, turned
        if self.loaded.states:
            counts = [one.count for one in slices]
            inputs[3, :tokens] = np.repeat([one.row.slot for one in slices], counts)
        if blocks:
            held = np.arange(len(inputs) - 4) < lengths[:, None]
            inputs[4:, :tokens].T[held] = np.concatenate(blocks)
        return inputs

    def copy_inputs(self, inputs: npt.NDArray[Any], size: int) -> None:
        """Plan a step, and copy its inputs to the graphs' tensors, in one transfer: int32 [4 + blocks, size]
        as of `inputs_of`. Rows that only fill the graph write to scratch block 0 and scratch slot 0.
        """
        self.loaded.plan_decode(inputs[1], inputs[4:].T)
        staged = to_device(inputs, self.device)
        for tensor, line in zip((self.ids, self.positions, self.rotary, self.slots), staged, strict=False):
            tensor[:size].copy_(line)
        self.table[:size, : len(staged) - 4].copy_(staged[4:].T)


def blocks_of(slices: StepSlices) -> list[Int32]:
    """The blocks of each token's row, int32 [blocks]."""
    counts = [one.count for one in slices.others]
    return [
        *map(attrgetter("blocks"), slices.rows),
        *chain(*map(repeat, (one.row.blocks for one in slices.others), counts)),
    ]


def are_same(blocks: Sequence[Int32], others: Sequence[Int32]) -> bool:
    """Whether these are the same arrays: a row whose blocks change has others, int32 [blocks]."""
    return len(blocks) == len(others) and all(map(is_, blocks, others))


def make_capture(device: torch.device) -> Capture:
    """Return a function that captures, with one pool of memory for all captures.

    It first runs what is to be captured, so that all kernels are loaded. All captures use one side stream,
    since libraries keep memory for each stream. CaptureError is raised before a capture begins: a failed
    capture leaves torch's allocator unusable.
    """
    pool, side = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(run: Callable[[], None]) -> Callable[[], None]:
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            run()
            run_without_sync(run)
        torch.cuda.current_stream(device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=side):
            run()
        return graph.replay

    return capture


def run_without_sync(run: Callable[[], None]) -> None:
    """Call `run`. Raises CaptureError if the host waits for the device meanwhile, as far as torch knows."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise CaptureError(first_line(error)) from error
    finally:
        torch.cuda.set_sync_debug_mode("default")


log = logging.getLogger(__name__)

UNCOMPILABLE = (
    torch._dynamo.exc.TorchDynamoException,
    torch._dynamo.exc.FailOnRecompileLimitHit,
    torch._inductor.exc.InductorError,
    OSError,
)
"""Errors of torch's compiler where it cannot compile a model, or the machine lacks what it needs."""
MAX_COMPILATIONS = 64
"""Of one piece of code. A model that needs more runs uncompiled as a whole, with a warning: by itself torch
would silently leave the layers beyond its limit uncompiled.
"""


def compile_layers(model: nn.Module, attentions: Iterable[nn.Module], try_out: Callable[[], object]) -> int:
    """Compile the layers → how many. `try_out` runs steps of all kinds of shapes. If it cannot be done, all
    layers run as they are, which is slower.
    """
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(compiled_folder()))
    torch._dynamo.config.recompile_limit = MAX_COMPILATIONS
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    layers = layers_of(model, attentions)
    for layer in layers:
        layer.compile(dynamic=True)
    try:
        try_out()
    except UNCOMPILABLE as error:
        log.warning("its layers are not compiled, steps are slower: %s", first_line(error))
        for layer in layers:
            layer._compiled_call_impl = None
        return 0
    return len(layers)


def compiled_folder() -> Path:
    """The folder where torch keeps what it compiles. By itself torch would run what it finds in a folder in
    /tmp whose name anybody can guess.
    """
    try:
        return make_cache_folder("inductor")
    except OSError:  # there is no home to write to
        return Path(tempfile.mkdtemp(prefix="tokenfleet-inductor-"))


def stop_compiling() -> None:
    """From now on run uncompiled what is not compiled yet: rows do not wait for a compiler."""
    log.info("compiled code: %d pieces", torch._dynamo.utils.counters["stats"]["unique_graphs"])
    torch.compiler.set_stance("eager_on_recompile")


def layers_of(model: nn.Module, attentions: Iterable[nn.Module]) -> list[Any]:
    """The numbered modules that contain the attention modules: `model.layers.3` for
    `model.layers.3.self_attn`.
    """
    names = {module: name for name, module in model.named_modules()}
    found = (re.match(r"(.*?\.)?\d+(?=\.|$)", names[attention]) for attention in attentions)
    return [model.get_submodule(name) for name in dict.fromkeys(match[0] for match in found if match)]
