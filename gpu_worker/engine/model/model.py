"""LoadedModel: a model on its device with a KV cache on its attention modules, and its forward.

While it sleeps it has no cache, and its weights wait in memory of the host. On CPU they stay where they are.
On a GPU the storages of all parameters and buffers are copied to pinned memory and freed; tensors, and views
of them, stay the same objects, so compiled layers stay valid. Captured graphs do not: they have addresses.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from common import model_files
from common.messages.request import HASHED_TOKENS
from gpu_worker.engine.adapters import AdapterLayers
from gpu_worker.engine.attention.backend import AttentionBackend, Geometry, KVCache, LayerSpec, attach
from gpu_worker.engine.batch.inputs import AdaptedStep, Inputs, PlacedEmbeddings, build_inputs
from gpu_worker.engine.batch.row import StepSlices
from gpu_worker.engine.batch.step_result import Int32
from gpu_worker.engine.model.rope import AxisRope, PerTokenRope, recompute_length
from gpu_worker.engine.model.weights import ModelSource
from gpu_worker.engine.parallel.model_parallel import WHOLE, ModelStage, TpPlan
from gpu_worker.engine.pictures.encoder import VisionTower
from gpu_worker.engine.pooling.head import PromptPooler
from gpu_worker.engine.states.model_states import ModelStates


@dataclass(slots=True)
class SleepingModel:
    """What a model needs to go on.

    Attributes:
        storages: of the weights on a GPU, each once; none on CPU.
        num_blocks: blocks that its cache had.
        spare_bytes: memory of the GPU that it left free while it was awake.
        copies: uint8 [bytes] in pinned memory, one for each storage.
    """

    device: torch.device
    storages: list[torch.UntypedStorage]
    num_blocks: int
    spare_bytes: int
    copies: list[torch.Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, models: Iterable[Any], device: torch.device, num_blocks: int) -> "SleepingModel":
        """The modules as they are, awake, with a cache."""
        if device.type == "cpu":
            return cls(device, [], num_blocks, 0)
        tensors = (tensor for model in models for tensor in chain(model.parameters(), model.buffers()))
        storages = unique_storages(tensors)
        return cls(device, storages, num_blocks, torch.cuda.mem_get_info(device)[0])

    def offload(self) -> None:
        """Copy the weights to the host, and free the memory that they had."""
        self.copies = [to_host(storage) for storage in self.storages]
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the copies are complete
        for storage in self.storages:
            storage.resize_(0)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def reload(self) -> None:
        """Copy the weights back. Raises torch.OutOfMemoryError."""
        for storage, copy in zip(self.storages, self.copies, strict=True):
            storage.resize_(len(copy))
            bytes_of(storage).copy_(copy, non_blocking=True)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # before the copies are freed
        self.copies = []

    def blocks_left(self, block_bytes: int, states_bytes: int = 0) -> int:
        """Blocks that the cache gets: as many as before if so much memory is free beside the rows' states.
        Raises MemoryError if there is room for none.
        """
        if self.device.type == "cpu" or not block_bytes:
            return self.num_blocks
        torch.cuda.empty_cache()
        free_bytes = torch.cuda.mem_get_info(self.device)[0] - self.spare_bytes - states_bytes
        num_blocks = min(self.num_blocks, free_bytes // block_bytes - 1)  # one more is the scratch block
        if num_blocks < 1:
            raise MemoryError(f"the GPU has {free_bytes} bytes for a cache whose blocks take {block_bytes}")
        return num_blocks


def unique_storages(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """The storages of tensors [...] of any dtype, each once: tied weights and views share one."""
    found = {storage.data_ptr(): storage for storage in (tensor.untyped_storage() for tensor in tensors)}
    return [storage for storage in found.values() if storage.nbytes()]


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """A view of a storage → uint8 [bytes]"""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def to_host(storage: torch.UntypedStorage) -> torch.Tensor:
    """A copy in memory of the host → uint8 [bytes], pinned if it comes from a GPU."""
    is_on_gpu = storage.device.type == "cuda"
    copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=is_on_gpu)
    return copy.copy_(bytes_of(storage), non_blocking=is_on_gpu)


class DeepStack:
    """Adds embeddings of pictures to the hidden states after each of the first layers (arXiv:2406.04334).

    Attributes:
        added: of the step that runs: the embeddings for the model's input, then those for each of the layers,
            beside each other: [tokens, hidden * (1 + layers)] of the model's dtype.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.added: Sequence[PlacedEmbeddings] = ()
        for number, layer in enumerate(layers, 1):
            layer.register_forward_hook(partial(self.add, number))

    def add(self, number: int, layer: Any, arguments: Any, states: torch.Tensor) -> None:
        """Add to the states [1, tokens, hidden] that a layer returns, in place."""
        hidden = states.shape[2]
        for places, values in self.added:
            states[0, places] += values[:, number * hidden : (number + 1) * hidden]


@dataclass(slots=True)
class Draft:
    """What proposes tokens beside a model, on the rank that samples.

    Attributes:
        method: as in SPECULATIVE_CONFIG.
        num_tokens: most tokens proposed at a time.
        model: its modules; None on other ranks.
        cached: the same as a model whose cache has the blocks of the other; None where nothing is cached.
        state_bytes: of the hidden states of one token that are kept on a GPU.
        recorded: layers of the model of which the draft takes the input.
    """

    method: str
    num_tokens: int
    model: Any = None
    cached: "LoadedModel | None" = None
    state_bytes: int = 0
    recorded: Sequence[Any] = ()


@dataclass(slots=True)
class LoadContext(ModelSource):
    """In what a model is loaded, and what is known of it.

    Attributes:
        plan, stage: how ranks share it, and which part of it this is.
        layers: what each attention module keeps of a token, in the order of layers.
        states: what rows keep beside the cache.
        tower: what encodes pictures; None of a model for text.
        adapters: where LoRA adapters lie on the device; None: it takes none.
        axis_rope: of a model whose pictures have positions of three axes.
        pooler: of an encoder, what pools.
    """

    plan: TpPlan = field(default_factory=lambda: TpPlan({}, {}))
    stage: ModelStage = WHOLE
    layers: dict[Any, LayerSpec] = field(default_factory=dict)
    states: ModelStates = field(default_factory=ModelStates)
    tower: VisionTower | None = None
    adapters: AdapterLayers | None = None
    ropes: list[PerTokenRope] = field(default_factory=list)
    axis_rope: AxisRope | None = None
    pooler: PromptPooler | None = None


@dataclass(slots=True, kw_only=True)
class LoadedModel(LoadContext):
    """A model that is ready to compute steps.

    Attributes:
        geometry: what its backend's cache has, and the draft's.
        tokenizer: the directory of its tokenizer.json.
        context: the longest sequence in tokens.
        recompute_length: a sequence beyond this length needs every K computed anew.
        deepstack: of a model whose first layers get embeddings of pictures, too.
        draft: what proposes tokens beside it.
        cache: set by `attach`.
        asleep: set by `sleep`.
    """

    model: Any
    backend: AttentionBackend
    context: int
    deepstack: DeepStack | None = None
    draft: Draft | None = None
    geometry: Geometry = field(init=False)
    tokenizer: Path = field(init=False)
    eos_ids: list[int] = field(init=False)
    vocab_size: int = field(init=False)
    recompute_length: int | None = field(init=False)
    cache: KVCache = field(init=False)
    asleep: SleepingModel = field(init=False)

    def __post_init__(self) -> None:
        self.geometry, self.vocab_size = self.backend.geometry, self.config.vocab_size
        self.tokenizer = model_files.find_tokenizer(self.settings.tokenizer_name, self.path)
        self.eos_ids = [] if self.is_encoder else model_files.eos_ids(self.path, self.tokenizer)
        self.recompute_length = recompute_length(self.model)

    @classmethod
    def of(cls, source: LoadContext, **own: Any) -> Self:
        """A model that was loaded in a context."""
        return cls(**{one.name: getattr(source, one.name) for one in fields(source)}, **own)

    @property
    def capturable(self) -> bool:
        """Whether steps in which all rows decode can be captured as CUDA graphs: within the model they need
        nothing from the host but ids, positions and tables. Steps of several stages are not captured, and
        rows that pool never decode.
        """
        is_whole = self.stage.num_stages == 1 and self.pooling is None
        return (
            is_whole and self.backend.capturable and not any(rope.needs_host_lengths for rope in self.ropes)
        )

    @property
    def computes_tokens_alone(self) -> bool:
        """Whether a token of a prompt is computed as one that is generated: it depends on no state, and on
        the tokens before it only by their K and V.
        """
        return not (self.states.mixers or self.ropes or self.axis_rope)

    @property
    def num_deep(self) -> int:
        """The first layers to which embeddings of pictures are added, too."""
        return self.tower.family.num_deep if self.tower and self.stage.is_first else 0

    @property
    def names_blocks(self) -> bool:
        """Whether what a block holds has a name: K and V of a token do not depend on later tokens, and hashes
        cover whole blocks. With states no pictures are before a block either: a row whose snapshot is gone is
        computed from its start, where they would be missing.
        """
        has_pictures = bool(self.states.mixers) and self.tower is not None
        return not self.ropes and not has_pictures and self.geometry.block_size % HASHED_TOKENS == 0

    @property
    def can_share_blocks(self) -> bool:
        """Whether rows can share blocks; in a model with states they need snapshots, too."""
        return (
            self.names_blocks and not self.is_encoder and (not self.states or self.states.num_snapshots > 0)
        )

    @property
    def max_row_blocks(self) -> int:
        """Blocks of the longest row."""
        return -(-self.context // self.geometry.block_size)

    def attach(self, num_blocks: int, geometry: Geometry | None = None) -> None:
        """Make a cache of `num_blocks` and the scratch block; of another geometry for a trial."""
        self.cache = KVCache(geometry or self.geometry, num_blocks, self.device)
        if self.device.type != "cpu":  # its pages take memory once they are written, and are zeros before
            self.cache.fill([0], 0.0)  # the scratch block, so that no row waits until this is compiled
        attach(self.layers, geometry or self.geometry, self.cache, self.backend)
        self.states.allocate(self.states.num_kept if num_blocks else 0)
        if geometry is None and self.draft and self.draft.cached:
            self.draft.cached.attach(num_blocks)

    def fill(self, blocks: Sequence[int], value: float) -> None:
        """Fill blocks of the cache, and of that of the draft."""
        self.cache.fill(blocks, value)
        if self.draft and self.draft.cached:
            self.draft.cached.fill(blocks, value)

    def sleep(self) -> None:
        """Give up the cache, and on a GPU the weights, which stay in memory of the host."""
        others = [part.model for part in (self.tower, self.draft) if part]
        models = [self.model, *(model for model in others if model)]
        self.asleep = SleepingModel.of(models, self.device, self.cache.num_blocks)
        self.attach(0)
        self.asleep.offload()

    def wake_up(self) -> None:
        """Take weights and cache back. Raises MemoryError."""
        self.asleep.reload()
        states_bytes = self.states.slot_bytes * (self.states.num_kept + 1)
        self.attach(self.asleep.blocks_left(self.geometry.block_bytes, states_bytes))

    @torch.inference_mode()
    def forward(self, inputs: Inputs, states: torch.Tensor | None = None) -> torch.Tensor:
        """Compute a step → logits [entries of `inputs.sampled`, vocabulary], float32 or the model's dtype;
        in a stage before the last: hidden states [tokens, hidden]. `states` [1, tokens, hidden] come from the
        stage before this one; without them the step is a trial.
        """
        if states is None:
            self.stage.try_out(self.model, inputs.ids.shape[1], self.device)
        else:
            self.stage.states = states
        self.set_adapters(inputs.adapters)
        self.backend.prepare_forward(inputs)
        self.states.prepare_forward(inputs)
        for rope in self.ropes:
            rope.lengths = inputs.lengths
        if self.axis_rope:
            self.axis_rope.positions = inputs.axes
        if self.pooler:
            self.pooler.slices = inputs.slices
        if self.deepstack:
            self.deepstack.added = inputs.pictures
        shows = inputs.pictures and self.stage.is_first
        try:
            tokens = {"inputs_embeds": self.embed(inputs)} if shows else {"input_ids": inputs.ids}
            logits = self.run(inputs.positions, inputs.sampled, **tokens)
        finally:
            if inputs.adapters:
                self.set_adapters(None)
        self.states.commit()
        return logits

    def compute(self, slices: StepSlices) -> torch.Tensor:
        """`forward` of arranged slices, by themselves."""
        return self.forward(build_inputs(slices, self.geometry.block_size, self.device))

    def embed(self, inputs: Inputs) -> torch.Tensor:
        """Embeddings of a step's tokens, those of pictures in their places → [1, tokens, hidden] of the
        model's dtype.
        """
        embeddings: torch.Tensor = self.model.get_input_embeddings()(inputs.ids)
        for places, values in inputs.pictures:
            embeddings[0, places] = values[:, : embeddings.shape[2]]
        return embeddings

    @torch.inference_mode()
    def plan_decode(self, positions: Int32, table: Int32) -> None:
        """Prepare what the host decides before a `decode`, captured or not: positions int32 [rows], table of
        blocks int32 [rows, blocks].
        """
        self.backend.plan_decode(positions, table)

    def set_adapters(self, step: AdaptedStep | None) -> None:
        """Say which tokens of the next `forward` or `decode` have an adapter. Whatever else calls layers has
        none: it finds None.
        """
        if self.adapters:
            self.adapters.prepare(step)

    @torch.inference_mode()
    def decode(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        table: torch.Tensor,
        is_split: bool = False,
        rotary: torch.Tensor | None = None,
        slots: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As `forward`, for rows that all decode; only if `capturable`. After `plan_decode` it needs nothing
        from the host.

        ids int64 [1, rows], positions int32 [rows], table of blocks int32 [rows, blocks] → logits [rows,
        vocabulary]. `is_split`: each row's keys are split. rotary int32 [rows]: what turns queries and keys,
        if not the positions. slots int32 [rows], of states.
        """
        self.backend.prepare_decode(positions, table, is_split)
        self.states.prepare_decode(slots)
        for rope in self.ropes:
            rope.lengths = positions.long() + 1  # rows that decode have outgrown their prompts
        if self.axis_rope:
            self.axis_rope.positions = None  # after pictures all axes have one number
        if self.deepstack:
            self.deepstack.added = ()
        turned = positions if rotary is None else rotary
        return self.run(turned.long()[None], 0, input_ids=ids)

    def run(self, positions: torch.Tensor, kept: torch.Tensor | int, **inputs: torch.Tensor) -> torch.Tensor:
        """positions int64 [1, tokens]; kept int64 [positions], or 0 for all; `input_ids` int64 [1, tokens] or
        `inputs_embeds` [1, tokens, hidden] of the model's dtype → logits [kept, vocabulary]
        """
        return self.stage.run(self.model, position_ids=positions, logits_to_keep=kept, **inputs)[0]
