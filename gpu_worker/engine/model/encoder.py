"""Encoders of BERT's family: loads one, and computes vectors or scores of whole prompts.

A step computes whole prompts, which follow each other in one flat line of tokens. Each token sees its own
sequence in both directions, and no other. Neighbours of one length are one call of torch's attention: nothing
is padded, and what a sequence gets does not depend on those beside it. There is no KV cache: blocks hold
nothing, and bound the tokens of the rows that the engine holds.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AutoConfig, AutoModel, AutoModelForSequenceClassification
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_outputs import BaseModelOutputWithPooling

from common import model_files
from common.messages.request import CLASSIFY
from common.pooling import CLS, LAST, MAX, OFFSET_POSITIONS, PoolingConfig
from common.settings.settings import SettingError, Settings
from gpu_worker.engine.attention.backend import AttentionBackend
from gpu_worker.engine.attention.kv_cache import Geometry
from gpu_worker.engine.batch.inputs import Inputs, to_device
from gpu_worker.engine.batch.row import PooledValues, RowSlice
from gpu_worker.engine.cpu.packed_linear import pack_linears
from gpu_worker.engine.model.config import ModelSource, cannot_serve, quantization_of
from gpu_worker.engine.model.model import LoadedModel
from gpu_worker.engine.model.weights import check_files, check_missing
from gpu_worker.engine.pooling.head import output_size, read_dense
from gpu_worker.engine.states.model_states import ModelStates
from gpu_worker.protocol import UnservableModel

NAME = "tokenfleet_packed"
POOLER = "pooler."
"""Weights that an embedding model does without: its vectors are pooled otherwise."""


class PackedAttention(AttentionBackend):
    """The attention of all layers in the forward that runs.

    Attributes:
        groups: (number of sequences, their length) of neighbours of one length, in the order of the line.
    """

    def __init__(self, geometry: Geometry) -> None:
        super().__init__(geometry)
        self.groups: list[tuple[int, int]] = []

    def attend_packed(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        **rest: Any,
    ) -> tuple[torch.Tensor, None]:
        """What transformers calls: query, key and value [1, heads, tokens, head_dim] of the model's dtype →
        [1, tokens, heads, head_dim]. A token sees those fewer than `sliding_window` places away.
        """
        begin, parts = 0, []
        for count, length in self.groups:
            end = begin + count * length
            mask = window_mask(length, sliding_window, query.device)
            queries, keys, values = (rows_of(states, begin, end, length) for states in (query, key, value))
            output = scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scaling)
            parts.append(output.transpose(1, 2).reshape(end - begin, *output.shape[1::2]))
            begin = end
        return torch.cat(parts)[None], None


def rows_of(states: torch.Tensor, begin: int, end: int, length: int) -> torch.Tensor:
    """states [1, heads, tokens, head_dim] → those of the sequences of one length, [sequences, heads, length,
    head_dim] of the same dtype
    """
    line = states[0].transpose(0, 1)[begin:end]
    return line.reshape(-1, length, *line.shape[1:]).transpose(1, 2)


def window_mask(length: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """Which places see each other, bool [length, length]; None if all do."""
    if window is None or length <= window:
        return None
    places = torch.arange(length, device=device)
    return (places[:, None] - places).abs() < window


@dataclass(slots=True, kw_only=True)
class EncoderModel(LoadedModel):
    """An encoder on its device.

    Attributes:
        head: makes the vectors or scores of pooled states, [sequences, hidden] of the model's dtype.
        first_position: number of a sequence's first position.
        has_types: whether tokens of a pair's second text have a type of their own.
    """

    head: nn.Module
    first_position: int
    has_types: bool
    computes_whole: bool = True

    @property
    def can_share_blocks(self) -> bool:
        """They hold nothing."""
        return False

    @torch.inference_mode()
    def forward(self, inputs: Inputs, states: torch.Tensor | None = None) -> torch.Tensor:
        """Compute the prompts that end in a step → their vectors or scores, float32 [prompts, size]"""
        slices = [part for part in inputs.slices if part.num_logits]
        if not slices:
            return torch.empty(0, self.vector_size, device=self.device)
        order = np.argsort([part.kv_len for part in slices], kind="stable")  # of one length: one call
        vectors = self.vectors([slices[place] for place in order])
        return vectors[torch.from_numpy(np.argsort(order)).to(self.device)]

    def vectors(self, slices: Sequence[RowSlice]) -> torch.Tensor:
        """→ float32 [prompts, size] of prompts in this order"""
        assert isinstance(self.backend, PackedAttention) and self.pooling
        lengths = [part.kv_len for part in slices]
        self.backend.groups = [(len([*group]), length) for length, group in groupby(lengths)]
        ids = np.concatenate([part.row.ids[: part.kv_len] for part in slices])
        positions = np.concatenate([np.arange(length) for length in lengths]) + self.first_position
        taken = {"input_ids": ids, "position_ids": positions}
        if self.has_types:
            taken["token_type_ids"] = np.concatenate([token_types(part) for part in slices])
        tensors = {name: to_device(one.astype(np.int64)[None], self.device) for name, one in taken.items()}
        states = self.model.base_model(**tensors).last_hidden_state[0]
        vectors: torch.Tensor = self.head(pool_states(states, lengths, self.pooling.method))
        return vectors.float()


def token_types(part: RowSlice) -> np.typing.NDArray[np.bool_]:
    """bool [tokens]: whether they are those of a pair's second text"""
    output = part.row.output
    start = (output.pair_start if isinstance(output, PooledValues) else 0) or part.kv_len
    return np.arange(part.kv_len) >= start


def pool_states(states: torch.Tensor, lengths: Sequence[int], method: str) -> torch.Tensor:
    """states [tokens, hidden] → one for each sequence, [sequences, hidden] of the same dtype"""
    counts = torch.tensor(lengths, device=states.device)
    ends = counts.cumsum(0)
    parts = torch.split(states, [*lengths])
    if method == CLS:
        return states[ends - counts]
    if method == LAST:
        return states[ends - 1]
    if method == MAX:
        return torch.stack([part.amax(0) for part in parts])
    return torch.stack([part.float().mean(0) for part in parts]).to(states.dtype)


@torch.inference_mode()
def load_encoder(source: ModelSource, pooling: PoolingConfig, block_size: int) -> EncoderModel:
    """Load an encoder. Raises SettingError if the settings cannot be served."""
    settings, path, device = source.settings, source.path, source.device
    if (size := source.communicator.world_size) > 1:
        cause = "an encoder is computed by one rank; NUM_WORKERS starts several of them"
        raise SettingError("num_shard", f"{size} ranks, but {cause}")
    attention = PackedAttention(Geometry([], block_size, source.dtype, source.dtype))
    AttentionInterface.register(NAME, attention.attend_packed)
    ALL_MASK_ATTENTION_FUNCTIONS._global_mapping.pop(NAME, None)  # so transformers makes no mask
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=settings.trust_remote_code)
        check_config(config, settings)
        model = read_encoder(path, config, pooling, settings, source.dtype).eval()
        if device.type == "cpu":
            pack_linears(model, {})
        head, size = make_head(model, config, pooling, source.dtype)
    except (UnservableModel, ValueError, OSError, KeyError) as error:
        raise cannot_serve(settings.model_id, error) from error
    if pooling.kind != CLASSIFY:
        model.pooling_head = head  # moves and sleeps with it
    loaded = EncoderModel(
        tokenizer=model_files.find_tokenizer(settings.tokenizer_name, path),
        model=model.to(device),
        attentions=[],
        geometry=attention.geometry,
        device=device,
        backend=attention,
        context=pooling.max_tokens,
        eos_ids=[],
        vocab_size=config.vocab_size,
        states=ModelStates(device),
        pooling=pooling,
        vector_size=size,
        head=head,
        first_position=config.pad_token_id + 1 if config.model_type in OFFSET_POSITIONS else 0,
        has_types=getattr(config, "type_vocab_size", 0) > 1 and config.model_type != "modernbert",
    )
    loaded.attach(settings.max_batch_size * loaded.max_row_blocks)
    return loaded


def check_config(config: Any, settings: Settings) -> None:
    """Raises SettingError for an encoder that is not served."""
    cause = ""
    if quantization_of(config) is not None:
        cause = "is quantised; encoders are served with plain weights"
    elif getattr(config, "is_decoder", False) or getattr(config, "add_cross_attention", False):
        cause = "is used as a decoder"
    elif getattr(config, "position_embedding_type", "absolute") not in ("absolute", None):
        cause = f"has positions of type {config.position_embedding_type}; only absolute ones are served"
    if cause:
        raise SettingError("model_id", f"{settings.model_id} ({config.model_type}) {cause}")
    if settings.quantize is not None:
        raise SettingError("quantize", f"{settings.quantize} is not served for encoders")


def read_encoder(
    path: Path, config: Any, pooling: PoolingConfig, settings: Settings, dtype: torch.dtype
) -> Any:
    """The model on the CPU. Raises SettingError where weights are missing."""
    kind: Any = AutoModelForSequenceClassification if pooling.kind == CLASSIFY else AutoModel
    options = {"attn_implementation": NAME, "trust_remote_code": settings.trust_remote_code}
    if settings.makes_weights:
        torch.manual_seed(0)
        return kind.from_config(config, **options).to(dtype)
    check_files(path, settings.model_id, is_plain=True)
    model, info = kind.from_pretrained(path, config=config, dtype=dtype, output_loading_info=True, **options)
    spare = (
        [] if pooling.kind == CLASSIFY else [name for name in info["missing_keys"] if name.startswith(POOLER)]
    )
    check_missing(info, settings.model_id, spare)
    return model


# --- heads --------------------------------------------------------------------------------------------------


class ClassifierHead(nn.Module):
    """What transformers' model for sequence classification does after its encoder, for which pooled states
    stand: sequences of one token.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = copy.copy(model)
        self.model._modules = dict(model._modules)
        self.encoder = self.model._modules.pop(model.base_model_prefix)
        setattr(self.model, model.base_model_prefix, self.give)

    def give(self, input_ids: None = None, inputs_embeds: Any = None, **rest: Any) -> Any:
        """inputs_embeds [sequences, 1, hidden] of the model's dtype → what the encoder returns for them"""
        pooler = getattr(self.encoder, "pooler", None)
        pooled = pooler(inputs_embeds) if pooler else None
        return BaseModelOutputWithPooling(last_hidden_state=inputs_embeds, pooler_output=pooled)

    def forward(self, pooled: torch.Tensor) -> torch.Tensor:
        """pooled [sequences, hidden] → scores [sequences, labels], both of the model's dtype"""
        scores: torch.Tensor = self.model(inputs_embeds=pooled[:, None]).logits
        return scores


def make_head(model: Any, config: Any, pooling: PoolingConfig, dtype: torch.dtype) -> tuple[nn.Module, int]:
    """The head, and the values that come out of it. Raises UnservableModel."""
    if pooling.kind == CLASSIFY:
        return ClassifierHead(model), int(config.num_labels)
    layers = read_dense(pooling.dense)
    hidden_size = getattr(config, "hidden_size", None) or config.dim
    return layers.to(dtype), output_size(layers, hidden_size)
