"""LoadedModel: a model on its device with a KV cache on its attention modules, and its forward."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from common.messages.block_hashes import HASHED_TOKENS
from gpu_worker.engine.attention.backend import AttentionBackend, attach
from gpu_worker.engine.attention.kv_cache import Geometry, KVCache
from gpu_worker.engine.batch.inputs import Inputs
from gpu_worker.engine.batch.step_result import Int32
from gpu_worker.engine.model.rope import PerTokenRope
from gpu_worker.engine.parallel.stage_model import ModelStage


@dataclass(slots=True)
class LoadedModel:
    """A model that is ready to compute steps.

    Attributes:
        tokenizer: the directory of its tokenizer.json.
        attentions: the model's attention modules, in the order of layers.
        context: the longest sequence in tokens.
        recompute_length: a sequence beyond this length needs every K computed anew.
        stage: which part of the model this is.
        cache: set by `attach`.
    """

    tokenizer: Path
    model: Any
    attentions: list[Any]
    geometry: Geometry
    device: torch.device
    backend: AttentionBackend
    ropes: list[PerTokenRope]
    context: int
    eos_ids: list[int]
    vocab_size: int
    recompute_length: int | None
    stage: ModelStage
    cache: KVCache = field(init=False)

    @property
    def capturable(self) -> bool:
        """Whether steps in which all rows decode can be captured as CUDA graphs: within the model they need
        nothing from the host but ids, positions and tables. Steps of several stages are not captured.
        """
        is_whole = self.stage.num_stages == 1
        return (
            is_whole and self.backend.capturable and not any(rope.needs_host_lengths for rope in self.ropes)
        )

    @property
    def can_share_blocks(self) -> bool:
        """Whether rows can share blocks: K and V of a token do not depend on later tokens, and hashes cover
        whole blocks.
        """
        return not self.ropes and self.geometry.block_size % HASHED_TOKENS == 0

    def attach(self, num_blocks: int, geometry: Geometry | None = None) -> None:
        """Make a cache of `num_blocks` and the scratch block; of another geometry for a trial."""
        self.cache = KVCache(geometry or self.geometry, num_blocks, self.device)
        self.cache.fill([0], 0.0)  # the scratch block: on CUDA, so that no row waits until this is compiled
        attach(self.attentions, geometry or self.geometry, self.cache, self.backend)

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
        self.backend.prepare_forward(inputs)
        for rope in self.ropes:
            rope.lengths = inputs.lengths
        return self.logits(inputs.ids, inputs.positions, inputs.sampled)

    @torch.inference_mode()
    def plan_decode(self, positions: Int32, table: Int32) -> None:
        """Prepare what the host decides before a `decode`, captured or not: positions int32 [rows], table of
        blocks int32 [rows, blocks].
        """
        self.backend.plan_decode(positions, table)  # type: ignore[attr-defined]

    def splits_rows(self, lengths: Int32) -> bool:
        """Whether rows that decode are split for the sake of a long one: lengths int [rows] in the cache."""
        return bool(self.backend.splits_rows(lengths))  # type: ignore[attr-defined]

    @torch.inference_mode()
    def decode(
        self, ids: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, is_split: bool = False
    ) -> torch.Tensor:
        """As `forward`, for rows that all decode; only if `capturable`. After `plan_decode` it needs nothing
        from the host.

        ids int64 [1, rows], positions int32 [rows], table of blocks int32 [rows, blocks] → logits [rows,
        vocabulary]. `is_split`: each row's keys are split.
        """
        self.backend.prepare_decode(positions, table, is_split)  # type: ignore[attr-defined]
        for rope in self.ropes:
            rope.lengths = positions.long() + 1  # rows that decode have outgrown their prompts
        return self.logits(ids, positions.long()[None], 0)

    def logits(self, ids: torch.Tensor, positions: torch.Tensor, kept: torch.Tensor | int) -> torch.Tensor:
        """ids and positions int64 [1, tokens]; kept int64 [positions], or 0 for all → logits [kept,
        vocabulary]
        """
        return self.stage.run(self.model, input_ids=ids, position_ids=positions, logits_to_keep=kept)[0]
