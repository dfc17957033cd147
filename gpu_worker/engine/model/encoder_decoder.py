"""Encoder-decoder models (T5, BART and their kin): loads one, and computes its steps.

transformers' own encoder and decoder run; attention of the decoder, and positions where the model has a table
of them, are those of packed rows.

A row's positions are those of its prompt, the last ones of which start the decoder, then of what it has
generated. Its blocks hold in the places of the encoded tokens the K and V by which the decoder sees them, in
the others its own. So an encoder-decoder row needs as many blocks as any other of its length.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForSeq2SeqLM

from common import model_files
from common.settings.settings import SettingError
from gpu_worker.engine.attention.backend import ENCODED, Geometry, LayerSpec, write_kv
from gpu_worker.engine.attention.sdpa import SdpaBackend
from gpu_worker.engine.batch.inputs import Inputs, RowTable, positions_of, to_device
from gpu_worker.engine.batch.row import RowSlice, StepSlices
from gpu_worker.engine.batch.step_result import Int32, Int64
from gpu_worker.engine.cpu.packed_linear import PackedLinear, pack_linears
from gpu_worker.engine.model.model import LoadContext, LoadedModel
from gpu_worker.engine.model.weights import check_files, load_pretrained, quantization_of
from gpu_worker.protocol import UnservableModel, refuse


class ModuleNames(NamedTuple):
    """Names of modules: the decoder's layers; in one of them attention to its own and to encoded tokens; in
    that what makes K and V, and the number of heads.
    """

    layers: str
    own: str
    encoded: str
    key: str
    value: str
    heads: str


BART = ModuleNames("layers", "self_attn", "encoder_attn", "k_proj", "v_proj", "num_heads")
T5 = ModuleNames("block", "layer.0.SelfAttention", "layer.1.EncDecAttention", "k", "v", "n_heads")
FAMILIES = {"bart": BART, "mbart": BART, "mt5": T5, "pegasus": BART, "t5": T5}
"""By the model types that are served."""

# --- what a step computes -----------------------------------------------------------------------------------


def num_encoded(row_slice: RowSlice, num_starting: int) -> int:
    """Tokens of a row that the encoder gets; the last `num_starting` of its prompt start the decoder."""
    row = row_slice.row
    return max(0, len(row.ids) - row.base - num_starting)


def encoded_prompts(slices: StepSlices, num_starting: int, block_size: int) -> Iterator[tuple[Int32, Int64]]:
    """Yield the prompts whose first token for the decoder is in the step: ids int32 [tokens] of the encoder,
    and where the decoder's K and V of each are written, int64 [tokens]. Earlier chunks of them compute
    nothing: each encoded token depends on all others.
    """
    for part in slices:
        encoded = num_encoded(part, num_starting)
        if 0 < encoded < part.kv_len and part.begin <= encoded:
            places, blocks = np.arange(encoded), part.row.blocks.astype(np.int64)
            yield part.row.ids[:encoded], blocks[places // block_size] * block_size + places % block_size


def decoder_inputs(inputs: Inputs, num_starting: int, block_size: int) -> tuple[Int64, Inputs]:
    """The places int64 [tokens] of the tokens of a step that are not only encoded, and the inputs of a step
    of these alone. Their positions are those of the decoder.
    """
    slices = inputs.slices
    encoded = np.array([num_encoded(part, num_starting) for part in slices], np.int64)
    positions, before = positions_of(slices), np.repeat(encoded, [part.count for part in slices])
    places = np.flatnonzero(positions >= before)
    device = inputs.ids.device
    chosen = to_device(places, device)
    own = [(part, count) for part, count in zip(slices, encoded.tolist(), strict=True) if part.kv_len > count]
    rows = RowTable.of(StepSlices([decoded_part(*one) for one in own]), block_size)
    return places, replace(
        inputs,
        ids=inputs.ids[:, chosen],
        positions=to_device((positions - before)[None, places], device),
        rows=replace(rows, encoded=np.array([count for _, count in own], np.int64)),
    )


def decoded_part(part: RowSlice, encoded: int) -> RowSlice:
    """What the decoder computes of a slice."""
    begin = max(part.begin, encoded)
    return RowSlice(part.row, begin, part.kv_len - begin, part.samples, proposed=part.proposed)


def table_of_biases(module: Any) -> torch.Tensor | None:
    """`LayerSpec.biases` of T5's attention; None of others. Encoded tokens have none."""
    if not getattr(module, "has_relative_attention_bias", False):
        return None
    buckets = module._relative_position_bucket(
        -torch.arange(module.relative_attention_max_distance + 1),
        bidirectional=False,
        num_buckets=module.relative_attention_num_buckets,
        max_distance=module.relative_attention_max_distance,
    )
    table: torch.Tensor = module.relative_attention_bias.weight.detach().cpu().float()[buckets].T.contiguous()
    return table


# --- the model ----------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class EncoderDecoderModel(LoadedModel):
    """An encoder-decoder model that is ready to compute steps.

    Attributes:
        pairs: attention modules of each layer of the decoder, to its own tokens and to encoded ones; their K
            and V lie in the same pages.
        num_starting: last tokens of a prompt, which start the decoder.
        places: int64 [tokens]; positions of the decoder's tokens in the forward that runs.
    """

    pairs: list[tuple[Any, Any]]
    num_starting: int
    places: torch.Tensor = field(init=False)

    @property
    def can_share_blocks(self) -> bool:
        """An encoded token depends on those after it."""
        return False

    def attach(self, num_blocks: int, geometry: Geometry | None = None) -> None:
        LoadedModel.attach(self, num_blocks, geometry)
        for own, encoded in self.pairs:
            encoded.keys, encoded.values = own.keys, own.values

    @torch.inference_mode()
    def forward(self, inputs: Inputs, states: torch.Tensor | None = None) -> torch.Tensor:
        """Compute a step → logits [entries of `inputs.sampled`, vocabulary] of the model's dtype."""
        block_size = self.geometry.block_size
        for ids, slots in encoded_prompts(inputs.slices, self.num_starting, block_size):
            self.encode(ids, slots)
        places, decoded = decoder_inputs(inputs, self.num_starting, block_size)
        shape = inputs.ids.shape[1], self.model.config.d_model
        hidden = torch.zeros(shape, dtype=self.geometry.dtype, device=self.device)
        if len(places):
            self.backend.prepare_forward(decoded)
            self.places = decoded.positions[0]
            states = self.decode_tokens(decoded.ids)[0].to(hidden.dtype)
            hidden[to_device(places, self.device)] = states
        return self.head(hidden[inputs.sampled])

    def encode(self, ids: Int32, slots: Int64) -> None:
        """Encode a prompt int32 [tokens], and write what the decoder sees of it to slots int64 [tokens]."""
        tokens = to_device(ids.astype(np.int64), self.device)[None]
        states = self.model.get_encoder()(input_ids=tokens).last_hidden_state
        places = to_device(slots, self.device)
        for _, module in self.pairs:
            heads = self.geometry.layers[0].kv_heads
            key, value = (part(states)[0].unflatten(1, (heads, -1)).transpose(0, 1) for part in module.makers)
            write_kv(module.keys, module.values, key, value, places)

    def decode_tokens(self, ids: torch.Tensor) -> torch.Tensor:
        """ids int64 [1, tokens] → hidden states [1, tokens, hidden]"""
        layer = self.geometry.layers[0]
        seen = torch.zeros(
            1, 1, layer.kv_heads * layer.key_dim, dtype=self.geometry.dtype, device=self.device
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


def load(source: LoadContext, block_size: int) -> EncoderDecoderModel:
    """Load a model, still without a cache. Raises SettingError, UnservableModel."""
    path, config, device, dtype = source.path, source.config, source.device, source.dtype
    check(source)
    check_files(path, source.settings.model_id, is_plain=True)
    read = partial(AutoModelForSeq2SeqLM.from_pretrained, path, config=config)
    model = load_pretrained(read, source.settings, dtype=dtype)
    if device.type == "cpu":
        pack_linears(model)
        hide_weights(model)
    model.to(device)
    names, decoder = FAMILIES[config.model_type], model.get_decoder()
    layers = [
        (layer.get_submodule(names.own), layer.get_submodule(names.encoded))
        for layer in getattr(decoder, names.layers)
    ]
    first = layers[0][0]
    heads = getattr(first, names.heads)
    dim = getattr(first, names.key).out_features // heads
    spec = LayerSpec(heads, 1, None, float(first.scaling), dim, dim, biases=table_of_biases(first))
    geometry = Geometry([spec] * len(layers), block_size, dtype, dtype)
    attention = SdpaBackend(geometry, device)
    over_encoded = replace(spec, sees=ENCODED, biases=None)
    attention.specs.add(over_encoded)
    of_encoder = copy.deepcopy(config)
    of_encoder._attn_implementation = "sdpa"
    for module in model.get_encoder().modules():
        if hasattr(module, "scaling"):  # its attention
            module.config = of_encoder
    for _, encoded in layers:
        # K and V of encoded tokens are made once a prompt, not in a forward
        encoded.makers = nn.ModuleList([getattr(encoded, name) for name in (names.key, names.value)])
        for name in (names.key, names.value):
            setattr(encoded, name, nn.Identity())
        encoded.backend, encoded.spec = attention, over_encoded
        encoded.key_scale = encoded.value_scale = 1.0
    source.layers = dict(zip((own for own, _ in layers), geometry.layers, strict=True))
    loaded = EncoderDecoderModel.of(
        source,
        model=model,
        backend=attention,
        context=model_files.context_length(path),
        pairs=layers,
        num_starting=len(model_files.starting_ids(path)),
    )
    table = getattr(decoder, "embed_positions", None)
    if table is not None:
        table.register_forward_pre_hook(loaded.replace_places, with_kwargs=True)
    return loaded


def check(source: LoadContext) -> None:
    """Refuse what such a model cannot be combined with. Raises SettingError, UnservableModel."""
    settings, config = source.settings, source.config
    kind = f"is an encoder-decoder model of type {config.model_type}"
    refuse(
        UnservableModel,
        (config.model_type not in FAMILIES, f"{kind}; served are {', '.join(FAMILIES)}"),
        (quantization_of(config), f"{kind}, and is quantised; such are served with plain weights"),
    )
    for name, is_set in (
        ("num_shard", source.communicator.world_size > 1),
        ("quantize", settings.quantize is not None),
        ("kv_cache_dtype", settings.kv_cache_dtype != "auto"),
        ("deterministic", settings.deterministic),
        ("rope_factor", settings.rope_factor is not None),
        ("load_format", settings.makes_weights),
    ):
        if is_set:
            raise SettingError(name, f"is not served with an encoder-decoder model ({config.model_type})")


def hide_weights(model: Any) -> None:
    """Show types of packed weights in place of weights, which would be computed back: T5 looks at one."""
    for module in model.modules():
        if isinstance(module, PackedLinear):
            module.__dict__["weight"] = torch.empty(0, dtype=module.weight_dtype)
