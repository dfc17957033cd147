"""EAGLE-3 (arXiv:2503.01840): one decoder layer that goes on from hidden states of three of the model's
layers.

Its input at a position is the hidden state there and the embedding of the token after it. What it gives
predicts the token after that, and stands for the hidden state at the next position.
"""

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

from gpu_worker.engine.attention.backend import NAME
from gpu_worker.engine.attention.kv_cache import AttentionSpec, LayerSpec
from gpu_worker.protocol import UnservableModel

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
