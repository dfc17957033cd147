"""Encoder-decoder models (T5, BART and their kin): loads one, and computes its steps.

transformers' own encoder and decoder run; attention of the decoder, and positions where the model has a table
of them, are those of packed rows.

A row's positions are those of its prompt, the last ones of which start the decoder, then of what it has
generated. Its blocks hold in the places of the encoded tokens the K and V by which the decoder sees them, in
the others its own. So an encoder-decoder row needs as many blocks as any other of its length.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForSeq2SeqLM

from common import model_files
from common.settings.settings import SettingError, Settings
from gpu_worker.engine.attention import backend
from gpu_worker.engine.attention.kv_cache import (
    AttentionSpec,
    Geometry,
    KVCache,
    LayerSpec,
    from_kv,
    write_kv,
)
from gpu_worker.engine.attention.sdpa import SdpaBackend
from gpu_worker.engine.batch.inputs import Inputs, positions_of, to_device
from gpu_worker.engine.batch.row import RowSlice
from gpu_worker.engine.batch.step_result import Int32
from gpu_worker.engine.cpu.packed_linear import PackedLinear, pack_linears
from gpu_worker.engine.model.config import ModelSource
from gpu_worker.engine.model.model import LoadedModel
from gpu_worker.engine.parallel.communicator import Communicator
from gpu_worker.engine.states.model_states import ModelStates
from gpu_worker.protocol import UnservableModel

FAMILIES = ("bart", "mbart", "mt5", "pegasus", "t5")
"""Model types that are served."""
MAX_GATHERED = 2**15
"""Keys that are gathered at once: those of all tokens would take the memory of a whole cache."""
Int64 = npt.NDArray[np.int64]

# --- what a step computes -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DecodedTokens:
    """The tokens of a step that the decoder computes; all int64.

    Attributes:
        places: [tokens]; places among all tokens of the step.
        positions: [tokens] in their rows.
        num_encoded: [tokens]; encoded tokens of their rows.
        slots: [tokens]; where their K and V are written.
        encoded_blocks: [tokens, blocks] of their rows' encoded tokens, padded with the scratch block 0.
        own_blocks: [tokens, blocks] of the decoder's tokens of their rows, likewise; encoded ones may lie
            before them in the first block.
    """

    places: Int64
    positions: Int64
    num_encoded: Int64
    slots: Int64
    encoded_blocks: Int64
    own_blocks: Int64


def num_encoded(row_slice: RowSlice, num_starting: int) -> int:
    """Tokens of a row that the encoder gets; the last `num_starting` of its prompt start the decoder."""
    row = row_slice.row
    return max(0, len(row.ids) - row.base - num_starting)


def encoded_prompts(
    slices: Sequence[RowSlice], num_starting: int, block_size: int
) -> Iterator[tuple[Int32, Int64]]:
    """Yield the prompts whose first token for the decoder is in the step: ids int32 [tokens] of the encoder,
    and where the decoder's K and V of each are written, int64 [tokens]. Earlier chunks of them compute
    nothing: each encoded token depends on all others.
    """
    for part in slices:
        encoded = num_encoded(part, num_starting)
        if 0 < encoded < part.kv_len and part.begin <= encoded:
            places, blocks = np.arange(encoded), part.row.blocks.astype(np.int64)
            yield part.row.ids[:encoded], blocks[places // block_size] * block_size + places % block_size


def decoded_tokens(inputs: Inputs, num_starting: int, block_size: int) -> DecodedTokens:
    """The tokens of a step that are not only encoded."""
    slices, positions = inputs.slices, positions_of(inputs.slices)
    encoded = np.array([num_encoded(part, num_starting) for part in slices], np.int64)
    ends = [part.kv_len if part.kv_len > own else 0 for part, own in zip(slices, encoded, strict=True)]
    lines = np.repeat(np.arange(len(slices)), [part.count for part in slices])
    places = np.flatnonzero(positions >= encoded[lines])
    lines, parts = lines[places], list(zip(slices, encoded.tolist(), ends, strict=True))
    encoded_blocks = [part.row.blocks[: -(-own // block_size) if end else 0] for part, own, end in parts]
    own_blocks = [part.row.blocks[own // block_size : -(-end // block_size)] for part, own, end in parts]
    return DecodedTokens(
        places=places,
        positions=positions[places],
        num_encoded=encoded[lines],
        slots=inputs.slots[places],
        encoded_blocks=padded(encoded_blocks)[lines],
        own_blocks=padded(own_blocks)[lines],
    )


def padded(lists: Sequence[Int32]) -> Int64:
    """Lists of blocks → int64 [lists, at least one], each filled up with block 0."""
    table = np.zeros((len(lists), max(1, *map(len, lists), 1)), np.int64)
    for line, blocks in zip(table, lists, strict=True):
        line[: len(blocks)] = blocks
    return table


# --- attention of the decoder -------------------------------------------------------------------------------


@dataclass(slots=True)
class SeenTokens:
    """What some decoded tokens see, on the device.

    Attributes:
        begin, end: places among the decoded tokens.
        pages: int64 [heads, tokens, blocks]; of each head its part of each block.
        seen: of each key in the blocks: bool [1, tokens, keys], or places in the table of biases, int64
            [tokens, keys].
    """

    begin: int
    end: int
    pages: torch.Tensor
    seen: torch.Tensor


class DecoderAttention:
    """Attention of the decoder to its own tokens and to the encoded ones.

    Attributes:
        relative: module with the relative position bias of T5 (arXiv:1910.10683); None without one. The
            encoded tokens have no bias.
        encoded: attention modules that see the encoded tokens.
        biases: [heads or 1, distances + 1]; of each distance to an earlier token, and of what is not seen.
    """

    def __init__(
        self, block_size: int, num_heads: int, device: torch.device, dtype: torch.dtype, relative: Any = None
    ) -> None:
        self.block_size = block_size
        self.num_heads = num_heads
        self.device = device
        self.relative = relative
        self.encoded: set[Any] = set()
        self.slots = torch.zeros(0, dtype=torch.int64, device=device)
        self.seen_own: list[SeenTokens] = []
        self.seen_encoded: list[SeenTokens] = []
        self.biases = table_of_biases(relative, device, dtype)

    def prepare(self, tokens: DecodedTokens) -> None:
        """Prepare a forward of these tokens: what all layers share."""
        self.slots = to_device(tokens.slots, self.device)
        positions = to_device(tokens.positions[:, None], self.device)
        num_encoded = to_device(tokens.num_encoded[:, None], self.device)
        self.seen_own = [
            SeenTokens(
                begin, end, pages, self.places_of_biases(positions[begin:end], num_encoded[begin:end], keys)
            )
            for begin, end, pages, keys in self.parts(tokens.own_blocks)
        ]
        self.seen_encoded = [  # of no encoded token, the first: a sum needs a key
            SeenTokens(begin, end, pages, (keys < num_encoded[begin:end].clamp(min=1))[None])
            for begin, end, pages, keys in self.parts(tokens.encoded_blocks)
        ]

    def parts(self, tables: Int64) -> Iterator[tuple[int, int, torch.Tensor, torch.Tensor]]:
        """Parts of the tokens whose keys fit in memory: begin, end, `pages` of SeenTokens, places of keys in
        their blocks int64 [keys].
        """
        num_keys = tables.shape[1] * self.block_size
        keys, at_once = torch.arange(num_keys, device=self.device), max(1, MAX_GATHERED // num_keys)
        heads = torch.arange(self.num_heads, device=self.device)[:, None, None]
        for begin in range(0, len(tables), at_once):
            end = min(begin + at_once, len(tables))
            yield begin, end, to_device(tables[begin:end], self.device) * self.num_heads + heads, keys

    def places_of_biases(
        self, positions: torch.Tensor, num_encoded: torch.Tensor, keys: torch.Tensor
    ) -> torch.Tensor:
        """positions and num_encoded int64 [tokens, 1], keys int64 [keys] from the row's first own block on →
        int64 [tokens, keys]
        """
        hidden = self.biases.shape[1] - 1
        keys = keys + num_encoded // self.block_size * self.block_size
        distances = (positions - keys).clamp(max=hidden - 1)
        return distances.masked_fill((keys < num_encoded) | (keys > positions), hidden)

    def attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """query [1, heads, tokens, head_dim]; key and value, of the decoder's own tokens, likewise, all of
        one dtype → [1, tokens, heads, head_dim]
        """
        if module in self.encoded:
            outputs = [attend_seen(module, query, one, one.seen) for one in self.seen_encoded]
        else:
            write_kv(module.keys, module.values, key[0], value[0], self.slots)
            outputs = [attend_seen(module, query, one, self.biases[:, one.seen]) for one in self.seen_own]
        return torch.cat(outputs, 1).transpose(0, 1)[None]


def attend_seen(module: Any, query: torch.Tensor, seen: SeenTokens, mask: torch.Tensor) -> torch.Tensor:
    """query [1, heads, all tokens, head_dim], mask bool or of its dtype [heads or 1, tokens, keys] → [heads,
    tokens, head_dim] of the query's dtype
    """
    keys, values = (gather(store, seen.pages, query.dtype) for store in (module.keys, module.values))
    queries = query[0, :, seen.begin : seen.end, None]
    output = scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask[:, :, None], scale=module.scaling
    )
    return output[:, :, 0]


def gather(store: torch.Tensor, pages: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Pages [blocks, heads, block_size, head_dim] of any dtype → [heads, tokens, keys, head_dim] of `dtype`.
    One copy of whole pages: torch's other ways to index take twice the time.
    """
    found = store.flatten(0, 1).flatten(1, 2).index_select(0, pages.flatten())
    return from_kv(found, dtype, 1.0).view(*pages.shape[:2], -1, store.shape[3])


@torch.inference_mode()
def table_of_biases(relative: Any, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """`biases` of DecoderAttention: [heads or 1, distances + 1] of `dtype`. Distances beyond the largest one
    count as it.
    """
    if relative is None:
        seen = torch.zeros(1, 1, dtype=dtype, device=device)
    else:
        buckets = relative._relative_position_bucket(
            -torch.arange(relative.relative_attention_max_distance + 1, device=device),
            bidirectional=False,
            num_buckets=relative.relative_attention_num_buckets,
            max_distance=relative.relative_attention_max_distance,
        )
        seen = relative.relative_attention_bias(buckets).to(dtype).T
    return torch.cat((seen, torch.full_like(seen[:, :1], torch.finfo(dtype).min)), 1)


# --- the model ----------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class EncoderDecoderModel(LoadedModel):
    """An encoder-decoder model that is ready to compute steps.

    Attributes:
        layers: attention modules of each layer of the decoder, to its own tokens and to encoded ones; their K
            and V lie in the same pages.
        decoder: attention of the decoder.
        num_starting: last tokens of a prompt, which start the decoder.
        places: int64 [tokens]; positions of the decoder's tokens in the forward that runs.
    """

    layers: list[tuple[Any, Any]]
    decoder: DecoderAttention
    num_starting: int
    places: torch.Tensor = field(init=False)

    @property
    def can_share_blocks(self) -> bool:
        """An encoded token depends on those after it."""
        return False

    def attach(self, num_blocks: int, geometry: Geometry | None = None) -> None:
        self.cache = KVCache(geometry or self.geometry, num_blocks, self.device)
        for modules, keys, values in zip(self.layers, self.cache.keys, self.cache.values, strict=True):
            for module in modules:
                module.keys, module.values = keys, values

    @torch.inference_mode()
    def forward(self, inputs: Inputs, states: torch.Tensor | None = None) -> torch.Tensor:
        """Compute a step → logits [entries of `inputs.sampled`, vocabulary] of the model's dtype."""
        block_size = self.geometry.block_size
        for ids, slots in encoded_prompts(inputs.slices, self.num_starting, block_size):
            self.encode(ids, slots)
        tokens = decoded_tokens(inputs, self.num_starting, block_size)
        hidden = torch.zeros(inputs.ids.shape[1], self.model.config.d_model, dtype=self.geometry.dtype)
        hidden = hidden.to(self.device)
        if len(tokens.places):
            chosen = to_device(tokens.places, self.device)
            self.decoder.prepare(tokens)
            self.places = to_device(tokens.positions - tokens.num_encoded, self.device)
            hidden[chosen] = self.decode_tokens(inputs.ids[:, chosen])[0].to(hidden.dtype)
        return self.head(hidden[inputs.sampled])

    def encode(self, ids: Int32, slots: Int64) -> None:
        """Encode a prompt int32 [tokens], and write what the decoder sees of it to slots int64 [tokens]."""
        tokens = to_device(ids.astype(np.int64), self.device)[None]
        states = self.model.get_encoder()(input_ids=tokens).last_hidden_state
        places = to_device(slots, self.device)
        for _, module in self.layers:
            key, value = (split_heads(part(states), module) for part in (module.encoded_k, module.encoded_v))
            write_kv(module.keys, module.values, key, value, places)

    def decode_tokens(self, ids: torch.Tensor) -> torch.Tensor:
        """ids int64 [1, tokens] → hidden states [1, tokens, hidden]"""
        spec = self.geometry.layers[0]
        seen = torch.zeros(
            1, 1, spec.spec.kv_heads * spec.key_dim, dtype=self.geometry.dtype, device=self.device
        )
        output = self.model.get_decoder()(input_ids=ids, encoder_hidden_states=seen, use_cache=False)
        states: torch.Tensor = output.last_hidden_state
        return states

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [positions, hidden] → logits [positions, vocabulary]. T5 scales what a tied head gets."""
        if getattr(self.model.config, "scale_decoder_outputs", False):
            hidden = hidden * self.model.config.d_model**-0.5
        logits: torch.Tensor = self.model.lm_head(hidden)
        bias = getattr(self.model, "final_logits_bias", None)
        return logits if bias is None else logits + bias

    def replace_places(self, module: Any, arguments: Any, options: Any) -> tuple[Any, dict[str, Any]]:
        """Hook of the decoder's table of positions: those of packed rows, in place of 0, 1, 2 …"""
        return arguments, options | {"position_ids": self.places}


def load(source: ModelSource, block_size: int) -> EncoderDecoderModel:
    """Load a model, still without a cache. Raises SettingError, UnservableModel."""
    settings, path, config = source.settings, source.path, source.config
    device, dtype = source.device, source.dtype
    check(settings, config, source.communicator)
    model = AutoModelForSeq2SeqLM.from_pretrained(
        path, config=config, dtype=dtype, attn_implementation=backend.NAME
    )
    model.eval()
    if device.type == "cpu":
        pack_linears(model, {})
        hide_weights(model)
    model.to(device)
    layers = [find_attention(layer) for layer in decoder_layers(model)]
    first = layers[0][0]
    spec = AttentionSpec(*heads_of(first), None, float(first.scaling))
    dim = projections(first)[0].out_features // spec.kv_heads
    geometry = Geometry([LayerSpec(spec, dim, dim)] * len(layers), block_size, dtype, dtype)
    relative = first if getattr(first, "has_relative_attention_bias", False) else None
    decoder = DecoderAttention(block_size, spec.kv_heads, device, dtype, relative)
    of_encoder = copy.deepcopy(config)
    of_encoder._attn_implementation = "sdpa"
    for module in attention_modules(model.get_encoder()):
        module.config = of_encoder
    for own, encoded in layers:
        take_projections(encoded)
        own.backend = encoded.backend = decoder
        decoder.encoded.add(encoded)
    tokenizer = model_files.find_tokenizer(settings.tokenizer_name, path)
    loaded = EncoderDecoderModel(
        tokenizer=tokenizer,
        model=model,
        attentions=[own for own, _ in layers],
        geometry=geometry,
        device=device,
        backend=SdpaBackend(geometry, device),
        context=model_files.context_length(path),
        eos_ids=model_files.eos_ids(path, tokenizer),
        vocab_size=config.vocab_size,
        states=ModelStates(device),
        layers=layers,
        decoder=decoder,
        num_starting=len(model_files.starting_ids(path)),
    )
    table = getattr(model.get_decoder(), "embed_positions", None)
    if table is not None:
        table.register_forward_pre_hook(loaded.replace_places, with_kwargs=True)
    return loaded


def check(settings: Settings, config: Any, communicator: Communicator) -> None:
    """Refuse what such a model cannot be combined with. Raises SettingError, UnservableModel."""
    if config.model_type not in FAMILIES:
        served = ", ".join(FAMILIES)
        raise UnservableModel(f"is an encoder-decoder model of type {config.model_type}; served are {served}")
    for name, is_set in (
        ("num_shard", communicator.world_size > 1),
        ("quantize", settings.quantize is not None),
        ("kv_cache_dtype", settings.kv_cache_dtype != "auto"),
        ("deterministic", settings.deterministic),
        ("rope_factor", settings.rope_factor is not None),
        ("load_format", settings.makes_weights),
    ):
        if is_set:
            raise SettingError(name, f"is not served with an encoder-decoder model ({config.model_type})")


def decoder_layers(model: Any) -> Any:
    decoder = model.get_decoder()
    return decoder.layers if hasattr(decoder, "layers") else decoder.block


def find_attention(layer: Any) -> tuple[Any, Any]:
    """The attention of one layer: BART's names, or T5's."""
    if hasattr(layer, "self_attn"):
        return layer.self_attn, layer.encoder_attn
    return layer.layer[0].SelfAttention, layer.layer[1].EncDecAttention


def attention_modules(encoder: Any) -> Iterator[Any]:
    return (module for module in encoder.modules() if hasattr(module, "scaling"))


def projections(module: Any) -> tuple[Any, Any]:
    """What makes K and V of an attention module."""
    return (module.k_proj, module.v_proj) if hasattr(module, "k_proj") else (module.k, module.v)


def take_projections(module: Any) -> None:
    """Take what makes K and V of the encoded tokens out of a forward: it is applied once a prompt."""
    module.encoded_k, module.encoded_v = projections(module)
    for name in ("k_proj", "v_proj") if hasattr(module, "k_proj") else ("k", "v"):
        setattr(module, name, torch.nn.Identity())


def hide_weights(model: Any) -> None:
    """Show types of packed weights in place of weights, which would be computed back: T5 looks at one."""
    for module in model.modules():
        if isinstance(module, PackedLinear):
            module.__dict__["weight"] = torch.empty(0, dtype=module.weight_dtype)


def heads_of(module: Any) -> tuple[int, int]:
    """Heads of K, and query heads that share one."""
    return (module.num_heads if hasattr(module, "num_heads") else module.n_heads), 1


def split_heads(states: torch.Tensor, module: Any) -> torch.Tensor:
    """states [1, tokens, heads * head_dim] → [heads, tokens, head_dim], the same dtype"""
    return states[0].view(states.shape[1], heads_of(module)[0], -1).transpose(0, 1)
