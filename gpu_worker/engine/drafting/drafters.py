"""Drafters: a model, or heads, that propose tokens for all rows of a step at once.

One rank drafts, the one that samples, and tells the others. Drafts are sampled as the row's own tokens are:
with its parameters, its grammar and the random numbers of those tokens. So a draft that computes the same
logits is always right, whatever the temperature.

A draft model is a smaller model with a cache of its own, whose blocks are those of the rows. Its K and V are
computed along with prompts, and along with drafts. Where they are missing (rows that paused, blocks of rows
that paused, tokens of an earlier worker) they are computed before the next draft, in chunks.

Heads draft from hidden states of the model.

EAGLE-3 (arXiv:2503.01840): one decoder layer that goes on from states of three of the model's layers. Its
input at a position is the hidden state there and the embedding of the token after it. What it gives
predicts the token after that, and stands for the hidden state at the next position. It has a cache of its
own, whose blocks are those of the rows.

The layer is computed at each position once the token after it is known: for chunks of prompts along with
them, for other tokens before the next draft. A row that pauses goes on with it, some tokens at a time. States
of tokens that other rows have computed are not there: a row that starts with their blocks drafts only if
these hold the layer's K and V.

Others take a row's last state, and cache nothing. Medusa (arXiv:2401.10774): each head proposes the token at
one place after the next, from that state alone. MLP speculator (arXiv:2404.19124; checkpoints of ibm-fms and
ibm-ai-platform): a recurrent state of the last hidden state and of the tokens proposed so far.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from gpu_worker.engine.attention.backend import NAME, LayerSpec
from gpu_worker.engine.batch.inputs import build_inputs, to_device
from gpu_worker.engine.batch.row import Row, RowSlice, StepPart, StepSlices, arrange, request_at
from gpu_worker.engine.batch.sampling_state import SamplingState
from gpu_worker.engine.batch.split_step import is_out_of_memory, release_tensors
from gpu_worker.engine.batch.step_result import Int32
from gpu_worker.engine.cuda.graphs import Capture, CudaGraphs
from gpu_worker.engine.drafting.proposers import Proposer
from gpu_worker.engine.model import warmup
from gpu_worker.engine.model.model import Draft, LoadedModel
from gpu_worker.engine.model.rope import BY_LENGTH
from gpu_worker.engine.sampling.grammar import Matchers
from gpu_worker.engine.sampling.sampler import sample
from gpu_worker.protocol import UnservableModel, refuse

log = logging.getLogger(__name__)

NO_DRAFT = -1
"""Fills up the drafts that are sent to other ranks."""


def draft_proposer_of(row: Row) -> Proposer | None:
    """The proposer of a row for which a model drafts."""
    return row.proposer if row.proposer and row.proposer.drafts_by else None


@dataclass(slots=True)
class DraftChain:
    """The drafts of one row, one after the other.

    Attributes:
        count: how many are wanted.
        state: that of the row after the drafts so far.
        piece: what a draft model computes next.
        hidden: of heads, the state [any] of the model's dtype from which the next draft is made.
    """

    row: Row
    proposer: Proposer
    count: int
    state: SamplingState | None
    piece: RowSlice | None = None
    hidden: torch.Tensor | None = None
    drafted: list[int] = field(default_factory=list)

    @property
    def goes_on(self) -> bool:
        samples = self.piece is None or self.piece.samples
        return samples and len(self.drafted) < self.count

    @property
    def last(self) -> int:
        """The token before the next draft."""
        return self.drafted[-1] if self.drafted else self.proposer.text.last

    def add(self, token: int) -> None:
        self.drafted.append(token)
        self.state = self.state.after(token) if self.state else None
        if self.piece:
            self.piece.row.last_id = token
            self.piece = RowSlice(self.piece.row, self.piece.kv_len, 1, True)


class Drafter(StepPart):
    """Makes drafts before each step. One of this class makes none: it stands on ranks that do not draft.

    Attributes:
        asked: the last drafts.
    """

    def __init__(self, draft: Draft, target: LoadedModel, matchers: Matchers) -> None:
        self.num_drafted = draft.num_tokens
        self.device = target.device
        self.vocab_size = target.vocab_size
        self.matchers = matchers
        self.communicator = target.communicator
        self.asked: list[DraftChain] = []

    # What kinds of drafters have of their own.

    def begin(self, chains: Sequence[DraftChain]) -> list[DraftChain]:
        """Those that are ready."""
        return []

    def compute(self, chains: Sequence[DraftChain]) -> tuple[list[DraftChain], torch.Tensor]:
        """Compute the next token of each → those that draft one more, in the order of their logits float
        [chains, vocabulary of the draft].
        """
        raise NotImplementedError

    def on_forward(self, slices: StepSlices) -> None:
        """Take note of a step that the model has just computed."""

    def capture(self, capture: Capture, max_rows: int) -> None:
        """Capture what can be captured of drafts for up to `max_rows` rows."""

    def trial(self, num_rows: int) -> Callable[[], object]:
        """What makes one draft for each of so many rows."""
        return lambda: None

    # What all do.

    def draft(self, chains: Sequence[DraftChain]) -> None:
        """Make the drafts of each row, at most `count`; none where it is not ready to draft."""
        running = self.begin(chains)
        while running:
            sampling, logits = self.compute(running)
            requests = [request_at(one.state, one.row.index + len(one.drafted)) for one in sampling]
            self.matchers.finish_masks(requests)
            ids = sample(fit(logits, self.vocab_size), requests).ids.tolist() if sampling else ()
            for chain, token in zip(sampling, ids, strict=True):
                chain.add(token)
            running = [chain for chain in running if chain.goes_on]

    def before(self, rows: Any) -> None:
        """Leave proposals for the next step with its rows, on all ranks those of one. A step has none if
        memory does not suffice for them; of several ranks the worker ends.
        """
        self.asked = wanted = self.wanted(rows.decoding(), rows.block_size, rows.num_spare)
        if not wanted:
            return
        try:
            self.draft(wanted)
        except RuntimeError as error:
            if self.communicator.world_size > 1 or not is_out_of_memory(error):
                raise
            log.warning("out of memory while drafting: a step has no proposals")
            release_tensors(error)
            torch.cuda.empty_cache()
            return
        missing = [[NO_DRAFT] * (self.num_drafted - len(one.drafted)) for one in wanted]
        filled = [one.drafted + rest for one, rest in zip(wanted, missing, strict=True)]
        sent = torch.tensor(filled).to(self.device)
        self.communicator.broadcast_tensor(sent)
        self.take(sent)

    def wanted(self, rows: Sequence[Row], block_size: int, spare: int) -> list[DraftChain]:
        """The rows that want drafts, the same on all ranks."""
        wanted: list[DraftChain] = []
        for row in rows:
            proposer = draft_proposer_of(row)
            room = len(row.blocks) * block_size - row.kv_len - 1
            most = min(room, row.max_new_tokens - row.index - 1, spare)
            if proposer is None or most <= 0 or row.num_unread or is_forced(row):
                continue
            if count := proposer.num_worth(most):
                wanted.append(DraftChain(row, proposer, count, row.sampling_state))
                spare -= count
        return wanted

    def take(self, drafts: torch.Tensor) -> None:
        """Leave drafts int64 [rows, most drafts], filled up with NO_DRAFT, with the rows."""
        for one, ids in zip(self.asked, drafts.tolist(), strict=True):
            one.proposer.take([token for token in ids if token != NO_DRAFT], len(self.asked))


def is_forced(row: Row) -> bool:
    """Whether a row's grammar says what comes next, so that nothing need be drafted."""
    state = row.sampling_state
    return bool(state and state.grammar and state.grammar.forced(1))


def fit(logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """logits float [rows, any] → [rows, vocab_size]: tokens that a draft lacks are never likely."""
    missing = vocab_size - logits.shape[1]
    if missing > 0:
        return torch.nn.functional.pad(logits, (0, missing), value=torch.finfo(logits.dtype).min)
    return logits[:, :vocab_size].contiguous() if missing else logits


MAX_CATCH_UP = {"cpu": 128, "cuda": 2048}
"""Tokens that are computed before a draft, at most, of rows whose K and V are missing."""


class BlockTable:
    """Which tokens of each block the draft's cache holds.

    Attributes:
        held: int64 [blocks + 1]: how many, from the block's first on.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.held = np.zeros(num_blocks + 1, np.int64)
        self.block_size = block_size

    def length(self, blocks: Int32) -> int:
        """How many tokens of a row are there from its first on."""
        held = self.held[blocks]
        incomplete = np.flatnonzero(held < self.block_size)
        full = int(incomplete[0]) if len(incomplete) else len(held)
        return full * self.block_size + (int(held[full]) if full < len(held) else 0)

    def note(self, blocks: Int32, length: int) -> None:
        """A row's first `length` tokens are there."""
        full, rest = divmod(length, self.block_size)
        self.held[blocks[:full]] = self.block_size
        if rest:
            self.held[blocks[full]] = max(self.held[blocks[full]], rest)


def piece_of(row: Row, known: Int32, begin: int, end: int, samples: bool) -> RowSlice:
    """The positions of a row's known ids from `begin` to `end`; two or fewer as a row that decodes, the last
    token as a proposal of it.
    """
    if samples and end - begin <= 2:
        first, *rest = known[begin:end].tolist()
        drafting = Row(row.number, known[:begin], 1, row.blocks)
        drafting.last_id = first
        return RowSlice(drafting, begin, end - begin, True, proposed=rest)
    return RowSlice(Row(row.number, known, 1, row.blocks), begin, end - begin, samples)


class ModelDrafter(Drafter):
    """Drafts by a model.

    Attributes:
        graphs: captured steps; None computes each step by itself.
    """

    def __init__(self, draft: Draft, *others: Any) -> None:
        super().__init__(draft, *others)
        assert draft.cached
        self.loaded = loaded = draft.cached
        self.block_size = loaded.geometry.block_size
        self.table = BlockTable(loaded.cache.num_blocks, self.block_size)
        self.graphs: CudaGraphs | None = None

    def capture(self, capture: Capture, max_rows: int) -> None:
        """Capture steps in which all rows draft one token."""
        if self.loaded.capturable:
            self.graphs = warmup.capture_steps(self.loaded, capture, max_rows, deterministic=False)

    def sleep(self) -> None:
        self.graphs = None
        self.table.held[:] = 0

    def trial(self, num_rows: int) -> Callable[[], object]:
        slices = warmup.prompt_parts(self.loaded, *[1] * num_rows)
        return lambda: self.forward(slices)

    def granted(self, blocks: Sequence[Int32]) -> None:
        for one in blocks:
            self.table.held[one] = 0

    def on_forward(self, slices: StepSlices) -> None:
        """Compute the chunks of prompts that the model has computed, as far as all tokens before them are
        there.
        """
        chunks = []
        for row_slice in slices:
            proposer = draft_proposer_of(row_slice.row)
            if row_slice.decodes or proposer is None or proposer.acceptance.is_paused:
                continue
            row = row_slice.row
            if self.held_length(row, proposer) >= row_slice.begin and row_slice.kv_len < self.loaded.context:
                chunks.append(RowSlice(row, row_slice.begin, row_slice.count, samples=False))
                proposer.kv_len = row_slice.kv_len
                self.table.note(row.blocks, row_slice.kv_len)
        if chunks:
            self.forward(StepSlices(chunks))

    def held_length(self, row: Row, proposer: Proposer) -> int:
        """How many of a row's tokens are in the cache, from the first on."""
        if proposer.kv_len is None:
            proposer.kv_len = min(self.table.length(row.blocks), proposer.text.length - 1)
        return proposer.kv_len

    def begin(self, chains: Sequence[DraftChain]) -> list[DraftChain]:
        left = MAX_CATCH_UP[self.loaded.device.type] + 2 * len(chains)
        for chain in chains:
            if chain.proposer.text.length + chain.count <= self.loaded.context:
                chain.piece = self.catch_up(chain, left)
                left -= chain.piece.count if chain.piece else 0
        return [chain for chain in chains if chain.piece]

    def compute(self, chains: Sequence[DraftChain]) -> tuple[list[DraftChain], torch.Tensor]:
        """Rows that have tokens left to compute before the next draft do not draft."""
        by_row = {chain.piece.row.number: chain for chain in chains if chain.piece}
        pieces = arrange([chain.piece for chain in chains if chain.piece])
        logits = self.forward(pieces)
        for piece in pieces:
            by_row[piece.row.number].proposer.kv_len = piece.kv_len
        return [by_row[piece.row.number] for piece in pieces if piece.samples], logits

    def catch_up(self, one: DraftChain, left: int) -> RowSlice | None:
        """What a row must compute before its first draft: all known tokens whose K and V are missing, at
        least the last; if these are more than `left`, only so many. None if it cannot draft.
        """
        text, row = one.proposer.text, one.row
        begin = self.held_length(row, one.proposer)
        if (
            text.length - begin > MAX_CATCH_UP[self.loaded.device.type]
            and one.proposer.acceptance.is_on_trial
        ):
            return None  # too dear as long as nobody knows whether drafts pay
        end = min(text.length, begin + max(1, left))
        self.table.note(row.blocks, end)
        known, samples = text.known[: text.length], end == text.length
        return piece_of(row, known, begin, end, samples)

    @torch.inference_mode()
    def forward(self, slices: StepSlices) -> torch.Tensor:
        """→ logits float [slices that sample, vocabulary], of the last token of each."""
        if self.graphs and self.graphs.can_run(slices, None):
            logits = self.graphs.run(slices, None)
        else:
            logits = self.loaded.compute(slices)
        counts = [piece.num_logits for piece in slices]
        if sum(counts) == sum(piece.samples for piece in slices):
            return logits
        ends = np.cumsum(counts)[[piece.samples for piece in slices]] - 1
        return logits[torch.as_tensor(ends, device=logits.device)]


class HiddenStates:
    """Records the input of modules in each forward.

    In a captured graph a hook runs only while it is captured: so on CUDA the states are copied to a place
    that stays, which the graph writes again whenever it is replayed.
    """

    def __init__(self, modules: Sequence[Any], target: LoadedModel) -> None:
        self.max_tokens = warmup.max_step_tokens(target.settings, target.device)
        self.device = target.device
        self.recorded: list[torch.Tensor] = [torch.empty(0)] * len(modules)
        for number, module in enumerate(modules):
            module.register_forward_pre_hook(partial(self.record, number), with_kwargs=True)

    def record(self, number: int, module: Any, arguments: Any, options: Any) -> None:
        """Keep the states [..., hidden] of any dtype that a module gets."""
        states = (arguments[0] if arguments else options["hidden_states"]).flatten(0, -2)
        if self.device.type != "cuda":
            self.recorded[number] = states
            return
        if len(self.recorded[number]) < self.max_tokens:
            self.recorded[number] = states.new_zeros(self.max_tokens, states.shape[1])
        self.recorded[number][: len(states)].copy_(states[: self.max_tokens])

    def newest(self, num_tokens: int) -> torch.Tensor:
        """Those of the last forward, of the model's dtype: [num_tokens, hidden of all modules]."""
        parts = [states[:num_tokens] for states in self.recorded]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


NUM_STATES = 3
LAYERS = "eagle_aux_hidden_state_layer_ids"
NOT_SERVED = ("num_hidden_layers", 1), ("hidden_act", "silu"), ("model_type", "llama")
"""Values of config.json, and the only ones that are served."""


class Eagle3Head(LlamaDecoderLayer):  # type: ignore[no-untyped-call]
    """The layer of one checkpoint, as a model; attention gets embedding and state beside each other. Hidden
    states are [1, tokens, hidden] of the weights' dtype.

    Attributes:
        embed_tokens: the checkpoint's own, or the model's.
        draft_to_target: int64 [draft vocabulary]: an id of the smaller vocabulary → what is added to it.
        keeps_normed: the first residual is the normalised state.
        names, unneeded: as HeadDrafter has them; EAGLE's own, and vLLM's and speculators'.
    """

    draft_to_target: torch.Tensor
    names: Mapping[str, str] = {
        r"^model\.": "",
        r"^(midlayer|layers\.0)\.": "",
        r"^d2t$": "draft_to_target",
    }
    unneeded = r"draft_to_target|embed_tokens\.weight"

    def __init__(self, config: LlamaConfig, state_size: int, draft_vocab_size: int, embedding: Any) -> None:
        super().__init__(config, 0)
        self.config = config
        size, epsilon = config.hidden_size, config.rms_norm_eps
        for name in ("q_proj", "k_proj", "v_proj"):
            own = getattr(self.self_attn, name)
            wide = nn.Linear(2 * size, own.out_features, bias=own.bias is not None)
            setattr(self.self_attn, name, wide)
        self.fc = nn.Linear(NUM_STATES * state_size, size, bias=False)
        self.embed_tokens = embedding or nn.Embedding(config.vocab_size, size)
        self.hidden_norm = LlamaRMSNorm(size, epsilon)
        self.norm = LlamaRMSNorm(size, epsilon)
        self.lm_head = nn.Linear(size, draft_vocab_size, bias=False)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.keeps_normed = bool(getattr(config, "norm_before_residual", False))
        self.register_buffer("draft_to_target", torch.zeros(draft_vocab_size, dtype=torch.int64))

    def forward(  # type: ignore[override]
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        logits_to_keep: torch.Tensor | int = 0,
        states: torch.Tensor | None = None,
        **_: Any,
    ) -> SimpleNamespace:
        """input_ids (the tokens after the positions) and position_ids int64 [1, tokens]; states as above,
        none for a trial; logits_to_keep int64 [kept], 0 for all → `logits` [1, kept, draft vocabulary] of the
        weights' dtype, and `states`.
        """
        embedded = self.embed_tokens(input_ids.clamp(max=self.embed_tokens.num_embeddings - 1))
        states = torch.zeros_like(embedded) if states is None else states
        normed = self.hidden_norm(states)
        residual = normed if self.keeps_normed else states
        rotation = self.rotary_emb(embedded, position_ids)
        mixed = torch.cat((self.input_layernorm(embedded), normed), -1)
        residual = residual + self.self_attn(mixed, position_embeddings=rotation, attention_mask=None)[0]
        states = residual + self.mlp(self.post_attention_layernorm(residual))
        kept = states if isinstance(logits_to_keep, int) else states[:, logits_to_keep]
        return SimpleNamespace(logits=self.lm_head(self.norm(kept)), states=states)

    def get_output_embeddings(self) -> Any:
        return self.lm_head

    @property
    def layer_spec(self) -> LayerSpec:
        """What its attention keeps of a token."""
        attention = self.self_attn
        heads = self.config.num_key_value_heads or self.config.num_attention_heads
        group, dim = attention.num_key_value_groups, attention.head_dim
        return LayerSpec(heads, group, None, attention.scaling, dim, dim)


def read_eagle_config(values: Mapping[str, Any], hidden_size: int) -> LlamaConfig:
    """The config of the layer. Raises UnservableModel for what is not served."""
    inner = values.get("transformer_layer_config") or values  # speculators' format
    size = values.get("target_hidden_size") or hidden_size
    refuse(
        UnservableModel,
        *(
            (
                inner.get(name, served) != served,
                f"its {name} is {inner.get(name)}, and only {served} is served for EAGLE-3",
            )
            for name, served in NOT_SERVED
        ),
        (size != hidden_size, f"its target_hidden_size is {size}, and the model's {hidden_size}"),
    )
    config = LlamaConfig(**{key: value for key, value in inner.items() if key != "architectures"})
    by_length = (config.rope_parameters or {}).get("rope_type") in BY_LENGTH
    refuse(UnservableModel, (by_length, "its rotary frequencies depend on the length of the prompt"))
    config._attn_implementation = NAME
    config.norm_before_residual = values.get("norm_before_residual", False)
    return config


def recorded_layers(values: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """The layers whose inputs it takes: those that config.json names, or EAGLE's own choice. Raises
    UnservableModel.
    """
    named = (values.get("eagle_config") or {}).get(LAYERS) or values.get(LAYERS)
    layers = tuple(named or (2, num_layers // 2, num_layers - 3))
    if len(layers) != NUM_STATES or not all(
        isinstance(layer, int) and 0 <= layer < num_layers for layer in layers
    ):
        raise UnservableModel(f"it takes states of layers {[*layers]}, and the model has {num_layers}")
    return layers


MAX_WAITING = 16
"""Tokens of a row whose states wait for the layer, at most, while it pauses."""
MAX_MISSING = 16
"""Tokens before those of a row whose K and V may be missing: the last ones of the row that had the blocks."""


class EagleDrafter(ModelDrafter):
    """Drafts by the layer.

    Attributes:
        states: inputs of three of the model's layers.
        inputs: by row, as drafting sees it, hidden states [tokens, hidden] of its next slice.
    """

    def __init__(self, draft: Draft, target: LoadedModel, *others: Any) -> None:
        super().__init__(draft, target, *others)
        self.layer: Any = self.loaded.model
        self.states = HiddenStates(draft.recorded, target)
        self.inputs: dict[Row, torch.Tensor] = {}

    @torch.inference_mode()
    def on_forward(self, slices: StepSlices) -> None:
        """Keep the states of a step, and compute the layer where the tokens after them are known."""
        states = self.states.newest(sum(row_slice.count for row_slice in slices))
        pieces, begin = [], 0
        for row_slice in slices:
            begin += row_slice.count
            proposer = draft_proposer_of(row_slice.row)
            if proposer is None:
                continue
            keep_states(proposer, row_slice.begin, states[begin - row_slice.count : begin])
            num_waiting = len(proposer.states[1]) if proposer.states else 0
            waits_long = proposer.acceptance.is_paused and num_waiting >= MAX_WAITING
            if (not row_slice.decodes or waits_long) and (piece := self.next_piece(row_slice.row, proposer)):
                pieces.append(piece)
        if pieces:
            self.forward(arrange(pieces))

    def catch_up(self, one: DraftChain, left: int) -> RowSlice | None:
        return self.next_piece(one.row, one.proposer)

    def next_piece(self, row: Row, proposer: Proposer) -> RowSlice | None:
        """The positions of a row that are not computed yet although the tokens after them are known; None if
        there are none, or if states before them are missing.
        """
        text, held = proposer.text, self.held_length(row, proposer)
        end = text.length - 1
        if proposer.states is None or proposer.states[0] > held + MAX_MISSING or held >= end:
            return None
        first, states = proposer.states
        held = max(held, first)
        self.table.note(row.blocks, end)
        piece = piece_of(row, text.known[1 : text.length], held, end, samples=True)
        self.inputs[piece.row] = self.layer.fc(states[held - first : end - first])
        proposer.states = (end, states[end - first :])
        proposer.kv_len = end
        return piece

    @torch.inference_mode()
    def forward(self, slices: StepSlices) -> torch.Tensor:
        """→ logits float [slices, vocabulary], of the last token of each; its state is the input of the next
        one.
        """
        inputs = build_inputs(slices, self.block_size, self.loaded.device)
        states = torch.cat([self.inputs.pop(piece.row) for piece in slices])[None]
        self.loaded.backend.prepare_forward(inputs)
        ends = torch.tensor([piece.count for piece in slices]).cumsum(0) - 1
        ends = ends.to(self.loaded.device)
        output = self.layer(inputs.ids, inputs.positions, ends, states)
        for piece, state in zip(slices, output.states[0, ends], strict=True):
            self.inputs[piece.row] = state[None]
        return self.of_target(output.logits[0])

    def draft(self, chains: Sequence[DraftChain]) -> None:
        super().draft(chains)
        self.inputs.clear()
        for one in chains:  # drafted states are no states of the model
            if one.proposer.states and one.proposer.kv_len is not None:
                one.proposer.kv_len = min(one.proposer.kv_len, one.proposer.text.length - 1)

    def of_target(self, logits: torch.Tensor) -> torch.Tensor:
        """logits float [rows, draft vocabulary] → [rows, vocabulary of the model]"""
        ids = torch.arange(logits.shape[1], device=logits.device) + self.layer.draft_to_target
        lowest = torch.finfo(logits.dtype).min
        found = logits.new_full((len(logits), self.vocab_size), lowest)
        return found.index_copy_(1, ids, logits)

    def trial(self, num_rows: int) -> Callable[[], object]:
        slices = warmup.prompt_parts(self.loaded, *[1] * num_rows)
        self.inputs = {piece.row: self.layer.norm.weight[None] for piece in slices}
        return lambda: self.forward(slices)

    def capture(self, capture: Capture, max_rows: int) -> None:
        """One layer is few operations: nothing is captured."""


def keep_states(proposer: Proposer, begin: int, states: torch.Tensor) -> None:
    """Keep hidden states [tokens, any] of the model's dtype from a position on, in place of earlier ones."""
    states = states.clone() if states.is_cuda else states
    if proposer.states is not None:
        first, earlier = proposer.states
        if first <= begin <= first + len(earlier):
            begin, states = first, torch.cat((earlier[: begin - first], states))
    proposer.states = (begin, states)


class MedusaHeads(nn.Module):
    """The heads of one checkpoint, by its config and the model's sizes. Raises UnservableModel.

    Attributes:
        num_heads: tokens proposed at a time.
        names: as HeadDrafter has them; those of Medusa itself and TGI, and of vLLM.
    """

    unneeded = r"blocks\..*\.bias"  # vLLM's may have none

    def __init__(self, config: Mapping[str, Any], hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        num_heads: Any = config.get("medusa_num_heads") or config.get("num_heads")
        num_layers = config.get("medusa_num_layers", config.get("num_hidden_layers", 1))
        are_known = isinstance(num_heads, int) and isinstance(num_layers, int)
        is_part = config.get("truncated_vocab_size") not in (None, vocab_size)
        refuse(
            UnservableModel,
            (not are_known, "its config.json has no medusa_num_heads"),
            (is_part, "its heads know a part of the vocabulary only"),
        )
        self.num_heads = num_heads
        self.names = {
            r"^medusa_head\.": "",
            r"^(\d+)\.(\d+)\.linear\.": r"blocks.\1.\2.",
            rf"^(\d+)\.{num_layers}\.": r"heads.\1.",
            r"^blocks\.(\d+)\.layers\.": r"blocks.\1.",
            r"^lm_heads\.": "heads.",
        }
        self.blocks = nn.ModuleList(
            nn.ModuleList(nn.Linear(hidden_size, hidden_size) for _ in range(num_layers))
            for _ in range(num_heads)
        )
        self.heads = nn.ModuleList(nn.Linear(hidden_size, vocab_size, bias=False) for _ in range(num_heads))

    def logits(
        self, place: int, states: torch.Tensor, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """states [rows, hidden], tokens int64 [rows] before this place → logits [rows, vocabulary], and the
        states for the next place.
        """
        hidden = states
        for block in self.blocks[place]:  # type: ignore[attr-defined]
            hidden = hidden + nn.functional.silu(block(hidden))
        return self.heads[place](hidden), states


EPSILON = 1e-6


class ShiftedNorm(nn.Module):
    """An L2 norm with weights and biases: [..., size] of any dtype → the same shape"""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.weight * nn.functional.rms_norm(states, self.weight.shape, eps=EPSILON) + self.bias


class MlpSpeculatorHeads(nn.Module):
    """The heads of one checkpoint, by its config and the model's sizes. Raises UnservableModel.

    Attributes:
        num_heads: tokens proposed at a time.
        tied: all places have the same weights, but for the first projection.
    """

    names: Mapping[str, str] = {r"^speculator\.": ""}
    unneeded = ""

    def __init__(self, config: Mapping[str, Any], hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        num_heads: Any = config.get("n_predict")
        inner: Any = config.get("inner_dim") or config.get("emb_dim")
        are_known = isinstance(num_heads, int) and isinstance(inner, int)
        refuse(
            UnservableModel,
            (not are_known, "its config.json has no n_predict and inner_dim"),
            *(
                (config.get(name, size) != size, f"its {name} is {config.get(name)}, and the model's {size}")
                for name, size in (("emb_dim", hidden_size), ("vocab_size", vocab_size))
            ),
        )
        self.num_heads = num_heads
        self.tied = tied = bool(config.get("tie_weights"))
        self.scales_input = bool(config.get("scale_input"))
        number = 1 if tied else num_heads
        self.emb = nn.ModuleList(nn.Embedding(vocab_size, inner) for _ in range(number))
        self.head = nn.ModuleList(nn.Linear(inner, vocab_size, bias=False) for _ in range(number))
        self.ln = nn.ModuleList(ShiftedNorm(inner) for _ in range(number))
        sizes = [hidden_size, *[inner] * ((min(2, num_heads) if tied else num_heads) - 1)]
        self.proj = nn.ModuleList(nn.Linear(size, inner, bias=False) for size in sizes)
        self.state_weight = 0.5 ** (0.5 / num_heads)
        self.token_weight = math.sqrt(1 - self.state_weight**2) * math.sqrt(inner / 2)

    def logits(
        self, place: int, states: torch.Tensor, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """states [rows, hidden or inner], tokens int64 [rows] before this place → logits [rows, vocabulary],
        and the states for the next place.
        """
        part = 0 if self.tied else place
        if self.scales_input and not place:
            states = nn.functional.rms_norm(states, states.shape[-1:], eps=EPSILON) * 2**-0.5
        projected = self.proj[min(place, len(self.proj) - 1)](states) * self.state_weight
        states = self.ln[part](projected + self.emb[part](tokens) * self.token_weight)
        states = nn.functional.gelu(states)
        return self.head[part](states), states


class HeadDrafter(Drafter):
    """Drafts by heads.

    Attributes:
        heads: MedusaHeads, or others with their methods. By `names`, patterns of names in checkpoints become
            those of their parameters; those `unneeded` may be missing, and are zero then.
        states: inputs of the model's output layer.
    """

    def __init__(self, draft: Draft, target: LoadedModel, *others: Any) -> None:
        super().__init__(draft, target, *others)
        self.heads: Any = draft.model
        self.states = HiddenStates([target.model.get_output_embeddings()], target)

    def on_forward(self, slices: StepSlices) -> None:
        """Keep the states from which rows sample: which of them is the last one is known once the step is
        read.
        """
        states = self.states.newest(sum(row_slice.num_logits for row_slice in slices))
        begin = 0
        for row_slice in slices:
            begin += row_slice.num_logits
            proposer = draft_proposer_of(row_slice.row)
            if row_slice.samples and proposer and not proposer.acceptance.is_paused:
                number = row_slice.num_samples
                kept = states[begin - number : begin]
                proposer.states = (row_slice.kv_len - number, kept.clone() if kept.is_cuda else kept)

    def begin(self, chains: Sequence[DraftChain]) -> list[DraftChain]:
        for chain in chains:
            chain.hidden = last_state(chain.proposer)
        return [chain for chain in chains if chain.hidden is not None]

    @torch.inference_mode()
    def compute(self, chains: Sequence[DraftChain]) -> tuple[list[DraftChain], torch.Tensor]:
        states = torch.stack([chain.hidden for chain in chains if chain.hidden is not None])
        tokens = to_device([chain.last for chain in chains], self.device)
        logits, states = self.heads.logits(len(chains[0].drafted), states, tokens)
        for chain, state in zip(chains, states, strict=True):
            chain.hidden = state
        return [*chains], logits

    def trial(self, num_rows: int) -> Callable[[], object]:
        weight = next(self.heads.parameters())
        hidden = self.states.recorded[0].shape[1]
        states = weight.new_zeros(num_rows, hidden)
        tokens = torch.zeros(num_rows, dtype=torch.int64, device=self.device)
        return torch.inference_mode()(lambda: self.heads.logits(0, states, tokens))


def last_state(proposer: Proposer) -> torch.Tensor | None:
    """The state [hidden] of the model's dtype that gave the row's last token; None if it was not kept."""
    if proposer.states is None:
        return None
    begin, states = proposer.states
    place = proposer.text.length - 2 - begin
    return states[place] if 0 <= place < len(states) else None
