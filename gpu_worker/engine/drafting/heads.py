"""Heads that draft from hidden states of the model.

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

import math
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from gpu_worker.engine.attention.backend import NAME, AttentionSpec, LayerSpec
from gpu_worker.engine.batch.inputs import build_inputs, to_device
from gpu_worker.engine.batch.row import Row, RowSlice, arrange
from gpu_worker.engine.cuda.graphs import Capture
from gpu_worker.engine.drafting.drafter import (
    DraftChain,
    Drafter,
    ModelDrafter,
    draft_proposer_of,
    piece_of,
)
from gpu_worker.engine.drafting.proposers import Proposer
from gpu_worker.engine.model.model import Draft, LoadedModel
from gpu_worker.engine.model.warmup import fastest_ms
from gpu_worker.protocol import UnservableModel


class HiddenStates:
    """Records the input of modules in each forward.

    In a captured graph a hook runs only while it is captured: so on CUDA the states are copied to a place
    that stays, which the graph writes again whenever it is replayed.
    """

    def __init__(self, modules: Sequence[Any], max_tokens: int, device: torch.device) -> None:
        self.max_tokens = max_tokens
        self.device = device
        self.recorded: list[torch.Tensor] = [torch.empty(0)] * len(modules)
        for number, module in enumerate(modules):
            module.register_forward_pre_hook(self.hook_of(number), with_kwargs=True)

    def hook_of(self, number: int) -> Any:
        def record(module: Any, arguments: Any, options: Any) -> None:
            states = arguments[0] if arguments else options["hidden_states"]
            self.record(number, states.reshape(-1, states.shape[-1]))

        return record

    def record(self, number: int, states: torch.Tensor) -> None:
        """Keep states [tokens, hidden] of any dtype."""
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


class Eagle3Head(nn.Module):
    """The layer of one checkpoint, as a model: hidden states are [1, tokens, hidden] of the weights' dtype.

    Attributes:
        embed_tokens: the checkpoint's own, or the model's.
        draft_to_target: int64 [draft vocabulary]: an id of the smaller vocabulary → what is added to it.
        keeps_normed: the first residual is the normalised state.
    """

    draft_to_target: torch.Tensor

    def __init__(self, config: LlamaConfig, state_size: int, draft_vocab_size: int, embedding: Any) -> None:
        super().__init__()
        self.config = config
        size, epsilon = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(NUM_STATES * state_size, size, bias=False)
        self.embed_tokens = embedding or nn.Embedding(config.vocab_size, size)
        self.input_layernorm = LlamaRMSNorm(size, epsilon)
        self.hidden_norm = LlamaRMSNorm(size, epsilon)
        self.self_attn = wide_attention(config)
        self.post_attention_layernorm = LlamaRMSNorm(size, epsilon)
        self.mlp = LlamaMLP(config)  # type: ignore[no-untyped-call]
        self.norm = LlamaRMSNorm(size, epsilon)
        self.lm_head = nn.Linear(size, draft_vocab_size, bias=False)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.keeps_normed = bool(getattr(config, "norm_before_residual", False))
        self.register_buffer("draft_to_target", torch.zeros(draft_vocab_size, dtype=torch.int64))

    def forward(
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
        spec = AttentionSpec(heads, attention.num_key_value_groups, None, attention.scaling)
        return LayerSpec(spec, attention.head_dim, attention.head_dim)

    def names(self) -> Mapping[str, Sequence[str]]:
        """Names of parameters → those in checkpoints: of EAGLE itself, and of vLLM and speculators."""
        return {name: names_of(name) for name, _ in self.named_parameters()}


def wide_attention(config: LlamaConfig) -> LlamaAttention:
    """Llama's attention over the embedding and the state beside each other."""
    attention = LlamaAttention(config, 0)
    for name in ("q_proj", "k_proj", "v_proj"):
        linear = getattr(attention, name)
        wide = nn.Linear(2 * config.hidden_size, linear.out_features, bias=linear.bias is not None)
        setattr(attention, name, wide)
    return attention


def names_of(name: str) -> tuple[str, ...]:
    """The names in checkpoints of a parameter."""
    of_layer = name.split(".")[0] not in ("fc", "embed_tokens", "norm", "lm_head")
    names = (f"midlayer.{name}", f"layers.0.{name}") if of_layer else (name,)
    return (*names, *(f"model.{one}" for one in names))


def read_eagle_config(values: Mapping[str, Any], hidden_size: int) -> LlamaConfig:
    """The config of the layer. Raises UnservableModel for what is not served."""
    inner = values.get("transformer_layer_config") or values  # speculators' format
    for name, served in NOT_SERVED:
        if inner.get(name, served) != served:
            raise UnservableModel(f"its {name} is {inner[name]}, and only {served} is served for EAGLE-3")
    if values.get("target_hidden_size", hidden_size) not in (None, hidden_size):
        raise UnservableModel(
            f"its target_hidden_size is {values['target_hidden_size']}, and the model's {hidden_size}"
        )
    config = LlamaConfig(**{key: value for key, value in inner.items() if key != "architectures"})
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

    def __init__(self, draft: Draft, *others: Any) -> None:
        super().__init__(draft, *others)
        self.layer: Any = self.loaded.model
        self.states = HiddenStates(draft.recorded, draft.max_states, self.device)
        self.inputs: dict[Row, torch.Tensor] = {}

    @torch.inference_mode()
    def on_forward(self, slices: Sequence[RowSlice]) -> None:
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
    def forward(self, slices: Sequence[RowSlice]) -> torch.Tensor:
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

    def measure_ms(self, num_rows: int) -> float:
        hidden = self.layer.config.hidden_size
        weight = self.layer.norm.weight

        def forward(slices: Sequence[RowSlice]) -> torch.Tensor:
            self.inputs = {piece.row: weight.new_zeros(1, hidden) for piece in slices}
            return self.forward(slices)

        return self.time_single_tokens(forward, num_rows)

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
    """The heads of one checkpoint.

    Attributes:
        num_heads: tokens proposed at a time.
    """

    def __init__(self, num_heads: int, num_layers: int, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.num_layers = num_layers
        self.blocks = nn.ModuleList(
            nn.ModuleList(nn.Linear(hidden_size, hidden_size) for _ in range(num_layers))
            for _ in range(num_heads)
        )
        self.heads = nn.ModuleList(nn.Linear(hidden_size, vocab_size, bias=False) for _ in range(num_heads))

    @classmethod
    def of(cls, config: Mapping[str, Any], hidden_size: int, vocab_size: int) -> "MedusaHeads":
        """Raises UnservableModel."""
        num_heads, num_layers = (
            config.get("medusa_num_heads") or config.get("num_heads"),
            config.get("medusa_num_layers", config.get("num_hidden_layers", 1)),
        )
        if not isinstance(num_heads, int) or not isinstance(num_layers, int):
            raise UnservableModel("its config.json has no medusa_num_heads")
        if config.get("truncated_vocab_size") not in (None, vocab_size):
            raise UnservableModel("its heads know a part of the vocabulary only")
        return cls(num_heads, num_layers, hidden_size, vocab_size)

    def names(self) -> Mapping[str, Sequence[str]]:
        """Names of parameters → those in checkpoints: of Medusa itself and TGI, and of vLLM."""
        last = self.num_layers
        found: dict[str, Sequence[str]] = {}
        for head in range(self.num_heads):
            for layer in range(last):
                for part in ("weight", "bias"):
                    own = f"{head}.{layer}.linear.{part}"
                    names = (own, f"medusa_head.{own}", f"blocks.{head}.layers.{layer}.{part}")
                    found[f"blocks.{head}.{layer}.{part}"] = names
            own = f"{head}.{last}.weight"
            found[f"heads.{head}.weight"] = (own, f"medusa_head.{own}", f"lm_heads.{head}.weight")
        return found

    def begin(self, states: torch.Tensor) -> torch.Tensor:
        """Hidden states [rows, hidden] of the model's dtype → what `logits` takes."""
        return states

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
PARTS = ("emb", "proj", "head", "ln")


class ShiftedNorm(nn.Module):
    """An L2 norm with weights and biases: [..., size] of any dtype → the same shape"""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.weight * nn.functional.rms_norm(states, self.weight.shape, eps=EPSILON) + self.bias


class MlpSpeculatorHeads(nn.Module):
    """The heads of one checkpoint.

    Attributes:
        num_heads: tokens proposed at a time.
        tied: all places have the same weights, but for the first projection.
    """

    def __init__(
        self,
        num_heads: int,
        hidden_size: int,
        inner: int,
        vocab_size: int,
        tied: bool = False,
        scales_input: bool = False,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.tied = tied
        self.scales_input = scales_input
        number = 1 if tied else num_heads
        self.emb = nn.ModuleList(nn.Embedding(vocab_size, inner) for _ in range(number))
        self.head = nn.ModuleList(nn.Linear(inner, vocab_size, bias=False) for _ in range(number))
        self.ln = nn.ModuleList(ShiftedNorm(inner) for _ in range(number))
        sizes = [hidden_size, *[inner] * ((min(2, num_heads) if tied else num_heads) - 1)]
        self.proj = nn.ModuleList(nn.Linear(size, inner, bias=False) for size in sizes)
        self.state_weight = 0.5 ** (0.5 / num_heads)
        self.token_weight = math.sqrt(1 - self.state_weight**2) * math.sqrt(inner / 2)

    @classmethod
    def of(cls, config: Mapping[str, Any], hidden_size: int, vocab_size: int) -> "MlpSpeculatorHeads":
        """Raises UnservableModel."""
        num_heads, inner = config.get("n_predict"), config.get("inner_dim") or config.get("emb_dim")
        if not isinstance(num_heads, int) or not isinstance(inner, int):
            raise UnservableModel("its config.json has no n_predict and inner_dim")
        for name, size in (("emb_dim", hidden_size), ("vocab_size", vocab_size)):
            if config.get(name, size) != size:
                raise UnservableModel(f"its {name} is {config[name]}, and the model's {size}")
        tied, scales = bool(config.get("tie_weights")), bool(config.get("scale_input"))
        return cls(num_heads, hidden_size, inner, vocab_size, tied, scales)

    def names(self) -> Mapping[str, Sequence[str]]:
        """Names of parameters → those in checkpoints."""
        return {name: (f"speculator.{name}", name) for name, _ in self.named_parameters()}

    def begin(self, states: torch.Tensor) -> torch.Tensor:
        """Hidden states [rows, hidden] of the model's dtype → what `logits` takes."""
        if not self.scales_input:
            return states
        return nn.functional.rms_norm(states, states.shape[-1:], eps=EPSILON) * 2**-0.5

    def logits(
        self, place: int, states: torch.Tensor, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """states [rows, hidden or inner], tokens int64 [rows] before this place → logits [rows, vocabulary],
        and the states for the next place.
        """
        part = 0 if self.tied else place
        projected = self.proj[min(place, len(self.proj) - 1)](states) * self.state_weight
        states = self.ln[part](projected + self.emb[part](tokens) * self.token_weight)
        states = nn.functional.gelu(states)
        return self.head[part](states), states


class HeadDrafter(Drafter):
    """Drafts by heads.

    Attributes:
        heads: MedusaHeads, or others with their methods.
        states: inputs of the model's output layer.
    """

    def __init__(self, draft: Draft, target: LoadedModel, *others: Any) -> None:
        super().__init__(draft, target, *others)
        self.heads: Any = draft.model
        self.states = HiddenStates([target.model.get_output_embeddings()], draft.max_states, target.device)

    def on_forward(self, slices: Sequence[RowSlice]) -> None:
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

    @torch.inference_mode()
    def begin(self, chains: Sequence[DraftChain]) -> list[DraftChain]:
        for chain in chains:
            state = last_state(chain.proposer)
            chain.hidden = None if state is None else self.heads.begin(state[None])[0]
        return [chain for chain in chains if chain.hidden is not None]

    @torch.inference_mode()
    def compute(self, chains: Sequence[DraftChain]) -> tuple[list[DraftChain], torch.Tensor]:
        states = torch.stack([chain.hidden for chain in chains if chain.hidden is not None])
        tokens = to_device([chain.last for chain in chains], self.device)
        logits, states = self.heads.logits(len(chains[0].drafted), states, tokens)
        for chain, state in zip(chains, states, strict=True):
            chain.hidden = state
        return [*chains], logits

    @torch.inference_mode()
    def measure_ms(self, num_rows: int) -> float:
        weight = next(self.heads.parameters())
        hidden = self.states.recorded[0].shape[1]
        states = self.heads.begin(weight.new_zeros(num_rows, hidden))
        tokens = torch.zeros(num_rows, dtype=torch.int64, device=self.device)
        return fastest_ms(lambda: self.heads.logits(0, states, tokens), self.device)


def last_state(proposer: Proposer) -> torch.Tensor | None:
    """The state [hidden] of the model's dtype that gave the row's last token; None if it was not kept."""
    if proposer.states is None:
        return None
    begin, states = proposer.states
    place = proposer.text.length - 2 - begin
    return states[place] if 0 <= place < len(states) else None
