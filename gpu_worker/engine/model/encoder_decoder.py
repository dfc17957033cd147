"""Encoder-decoder models (T5, BART and their kin): loads one, and computes its steps.

transformers' own encoder and decoder run; attention of the decoder, and positions where the model has a table
of them, are those of packed rows.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForSeq2SeqLM

from common import model_files
from common.settings.settings import SettingError, Settings
from gpu_worker.engine.attention import backend
from gpu_worker.engine.attention.encoder_decoder import DecoderAttention
from gpu_worker.engine.attention.kv_cache import AttentionSpec, Geometry, KVCache, LayerSpec, write_kv
from gpu_worker.engine.attention.sdpa import SdpaBackend
from gpu_worker.engine.batch.encoder_decoder import EncodedPrompt, decoded_tokens, encoded_prompts
from gpu_worker.engine.batch.inputs import Inputs, to_device
from gpu_worker.engine.cpu.packed_linear import PackedLinear, pack_linears
from gpu_worker.engine.model.model import LoadedModel
from gpu_worker.engine.parallel.communicator import Communicator
from gpu_worker.engine.parallel.stages import WHOLE
from gpu_worker.engine.states.model_states import ModelStates
from gpu_worker.protocol import UnservableModel

FAMILIES = ("bart", "mbart", "mt5", "pegasus", "t5")
"""Model types that are served."""


@dataclass(slots=True)
class DecoderLayer:
    """The attention modules of one layer of the decoder; their K and V lie in the same pages."""

    own: Any
    encoded: Any


@dataclass(slots=True, kw_only=True)
class EncoderDecoderModel(LoadedModel):
    """An encoder-decoder model that is ready to compute steps.

    Attributes:
        layers: of the decoder.
        decoder: attention of the decoder.
        num_starting: last tokens of a prompt, which start the decoder.
        places: int64 [tokens]; positions of the decoder's tokens in the forward that runs.
    """

    layers: list[DecoderLayer]
    decoder: DecoderAttention
    num_starting: int
    places: torch.Tensor = field(init=False)

    @property
    def capturable(self) -> bool:
        return False

    @property
    def can_share_blocks(self) -> bool:
        """An encoded token depends on those after it."""
        return False

    def attach(self, num_blocks: int, geometry: Geometry | None = None) -> None:
        self.cache = KVCache(geometry or self.geometry, num_blocks, self.device)
        for layer, keys, values in zip(self.layers, self.cache.keys, self.cache.values, strict=True):
            for module in (layer.own, layer.encoded):
                module.keys, module.values = keys, values

    @torch.inference_mode()
    def forward(self, inputs: Inputs, states: torch.Tensor | None = None) -> torch.Tensor:
        """Compute a step → logits [entries of `inputs.sampled`, vocabulary] of the model's dtype."""
        block_size = self.geometry.block_size
        for prompt in encoded_prompts(inputs.slices, self.num_starting, block_size):
            self.encode(prompt)
        tokens = decoded_tokens(inputs.slices, self.num_starting, block_size)
        hidden = torch.zeros(inputs.ids.shape[1], self.model.config.d_model, dtype=self.geometry.dtype)
        hidden = hidden.to(self.device)
        if len(tokens.places):
            chosen = to_device(tokens.places, self.device)
            self.decoder.prepare(tokens)
            self.places = to_device(tokens.positions - tokens.num_encoded, self.device)
            hidden[chosen] = self.decode_tokens(inputs.ids[:, chosen])[0].to(hidden.dtype)
        return self.head(hidden[inputs.sampled])

    def encode(self, prompt: EncodedPrompt) -> None:
        """Encode a prompt, and write what the decoder sees of it."""
        ids = to_device(prompt.ids.astype(np.int64), self.device)[None]
        states = self.model.get_encoder()(input_ids=ids).last_hidden_state
        slots = to_device(prompt.slots, self.device)
        for layer in self.layers:
            module = layer.encoded
            key, value = (split_heads(part(states), module) for part in (module.encoded_k, module.encoded_v))
            write_kv(layer.encoded.keys, layer.encoded.values, key, value, slots)

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


def load(
    settings: Settings,
    path: Path,
    config: Any,
    dtype: torch.dtype,
    device: torch.device,
    communicator: Communicator,
    block_size: int,
) -> EncoderDecoderModel:
    """Load a model, still without a cache. Raises SettingError, UnservableModel."""
    check(settings, config, communicator)
    model = AutoModelForSeq2SeqLM.from_pretrained(
        path, config=config, dtype=dtype, attn_implementation=backend.NAME
    )
    model.eval()
    if device.type == "cpu":
        pack_linears(model, {})
        hide_weights(model)
    model.to(device)
    layers = [find_attention(layer) for layer in decoder_layers(model)]
    spec = AttentionSpec(*heads_of(layers[0].own), None, float(layers[0].own.scaling))
    dim = projections(layers[0].own)[0].out_features // spec.kv_heads
    geometry = Geometry([LayerSpec(spec, dim, dim)] * len(layers), block_size, dtype, dtype)
    decoder = DecoderAttention(block_size, spec.kv_heads, device, dtype, relative_of(layers[0].own))
    of_encoder = copy.deepcopy(config)
    of_encoder._attn_implementation = "sdpa"
    for module in attention_modules(model.get_encoder()):
        module.config = of_encoder
    for layer in layers:
        take_projections(layer.encoded)
        layer.own.backend = layer.encoded.backend = decoder
        decoder.encoded.add(layer.encoded)
    tokenizer = model_files.find_tokenizer(settings.tokenizer_name, path)
    loaded = EncoderDecoderModel(
        tokenizer=tokenizer,
        model=model,
        attentions=[layer.own for layer in layers],
        geometry=geometry,
        device=device,
        backend=SdpaBackend(geometry, device),
        ropes=[],
        context=model_files.context_length(path),
        eos_ids=model_files.eos_ids(path, tokenizer),
        vocab_size=config.vocab_size,
        recompute_length=None,
        stage=WHOLE,
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


def find_attention(layer: Any) -> DecoderLayer:
    """The attention of one layer: BART's names, or T5's."""
    if hasattr(layer, "self_attn"):
        return DecoderLayer(layer.self_attn, layer.encoder_attn)
    return DecoderLayer(layer.layer[0].SelfAttention, layer.layer[1].EncDecAttention)


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


def relative_of(module: Any) -> Any:
    """The module itself if it has T5's table of relative positions; else None."""
    return module if getattr(module, "has_relative_attention_bias", False) else None


def split_heads(states: torch.Tensor, module: Any) -> torch.Tensor:
    """states [1, tokens, heads * head_dim] → [heads, tokens, head_dim], the same dtype"""
    return states[0].view(states.shape[1], heads_of(module)[0], -1).transpose(0, 1)
