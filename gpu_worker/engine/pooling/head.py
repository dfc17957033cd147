"""Pooling: a forward brings vectors or scores instead of logits.

A pooling head takes the place of a decoder's head. A decoder's tokens see only those before them, so the
vector of the last one stands for the whole prompt, and prompts are computed in chunks, with shared blocks, as
those of generating models. What comes after the last hidden states is read from the model's files: the linear
layers of sentence-transformers' module Dense, and the head of a classifier.

An encoder's tokens see each other in both directions, so a step computes whole prompts, and the vectors of a
prompt's tokens become one. Blocks hold nothing, and bound the tokens of the rows that the engine holds.
"""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPooling, CausalLMOutput

from common.messages.request import CLASSIFY
from common.model_files import read_json
from common.pooling import CLS, LAST, MAX, OFFSET_POSITIONS, PoolingConfig
from gpu_worker.engine.batch.inputs import to_device
from gpu_worker.engine.batch.row import PooledValues, RowSlice
from gpu_worker.engine.parallel.model_parallel import Forward, ModelStage, StageEnd, TpPlan, connect
from gpu_worker.engine.quantization.checkpoint import file_slices
from gpu_worker.protocol import UnservableModel, refuse

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "Tanh": nn.Tanh,
    "Identity": nn.Identity,
    "ReLU": nn.ReLU,
    "GELU": nn.GELU,
    "Sigmoid": nn.Sigmoid,
    "SiLU": nn.SiLU,
}
"""Classes of torch that a module Dense may name."""
SCORE = "score.weight"
"""The head of a decoder with a classifier, in transformers."""


def read_layers(path: Path, pooling: PoolingConfig, hidden_size: int) -> nn.Sequential:
    """The layers after the last hidden states, float32 on the CPU: the head of a decoder that classifies, or
    those of the modules Dense. Raises UnservableModel unless vectors are as long as the files say.
    """
    layers = [layer for folder in pooling.dense for layer in dense_layers(folder)]
    layers = [read_score_head(path)] if pooling.kind == CLASSIFY else layers
    size = [hidden_size, *(layer.out_features for layer in layers if isinstance(layer, nn.Linear))][-1]
    if size != pooling.size:
        raise UnservableModel(f"its vectors have {size} values, and its files say {pooling.size}")
    return nn.Sequential(*layers)


def dense_layers(folder: Path) -> list[nn.Module]:
    config = read_json(folder / "config.json")
    name = str(config.get("activation_function") or "torch.nn.modules.activation.Tanh").rpartition(".")[2]
    file = folder / "model.safetensors"
    refuse(
        UnservableModel,
        (name not in ACTIVATIONS, f"its module {folder.name} has the activation {name}, which is not served"),
        (not file.is_file(), f"its module {folder.name} has no model.safetensors"),
    )
    weights = load_file(file)
    return [linear_of(weights["linear.weight"], weights.get("linear.bias")), ACTIVATIONS[name]()]


def linear_of(weight: torch.Tensor, bias: torch.Tensor | None = None) -> nn.Linear:
    """weight float [outputs, inputs] and bias float [outputs] → the layer, in float32"""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None)
    layer.weight = nn.Parameter(weight.float(), requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias.float(), requires_grad=False)
    return layer


def read_score_head(path: Path) -> nn.Linear:
    """The head of a decoder that classifies. Raises UnservableModel."""
    found = dict(file_slices(path)).get(SCORE)
    if found is None:
        raise UnservableModel(f"it is a classifier without a {SCORE}")
    return linear_of(found[...])


class PoolingHead(nn.Sequential):
    """Ends the forward with what its layers make of hidden states: some models change logits after their
    head.
    """

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """states [1, tokens, hidden] of the model's dtype. Raises StageEnd with the vectors [1, tokens,
        values].
        """
        raise StageEnd(super().forward(states))  # type: ignore[no-untyped-call]


def replace_head(model: Any, plan: TpPlan, stage: ModelStage, path: Path, pooling: PoolingConfig) -> TpPlan:
    """Replace the head of a decoder → the plan of what is left. A stage that is not the last has no head.
    Raises UnservableModel without one.
    """
    layers = read_layers(path, pooling, model.config.hidden_size)
    if not stage.is_last:
        return plan
    name = {module: name for name, module in model.named_modules()}.get(model.get_output_embeddings())
    if name is None:
        raise UnservableModel("it has no head whose input could be its vectors")
    model.set_submodule(name, PoolingHead(*layers.to(model.dtype)))
    return TpPlan(
        {key: shards for key, shards in plan.shards.items() if not key.startswith(f"{name}.")},
        {key: style for key, style in plan.styles.items() if key != name},
    )


# --- encoders -----------------------------------------------------------------------------------------------


class PromptPooler(nn.Module):
    """Makes vectors or scores of an encoder's hidden states.

    Attributes:
        head: what comes after pooling: [prompts, hidden] → [prompts, size], of the model's dtype.
        first_position: number of a prompt's first position.
        has_types: whether tokens of a pair's second text have a type of their own.
        slices: the prompts of the step that runs, whole and in the order of its tokens.
    """

    def __init__(self, model: Any, path: Path, pooling: PoolingConfig) -> None:
        super().__init__()
        config = model.config
        self.is_classifier, self.method = pooling.kind == CLASSIFY, pooling.method
        if self.is_classifier:
            self.head: Any = ClassifierHead(model)
        else:
            layers = read_layers(path, pooling, getattr(config, "hidden_size", None) or config.dim)
            self.head = layers.to(model.device, model.dtype)
        self.first_position = config.pad_token_id + 1 if config.model_type in OFFSET_POSITIONS else 0
        self.has_types = getattr(config, "type_vocab_size", 0) > 1 and config.model_type != "modernbert"
        self.slices: Sequence[RowSlice] = ()

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """states [tokens, hidden] of the model's dtype → float32 [prompts, size]"""
        vectors: torch.Tensor = self.head(
            pool_states(states, [one.count for one in self.slices], self.method)
        )
        return vectors.float()


def pool_prompts(model: Any, path: Path, pooling: PoolingConfig) -> PromptPooler:
    """Make an encoder's forward end with vectors or scores. Raises UnservableModel."""
    pooler = PromptPooler(model, path, pooling)
    connect(model, pool, prompt_pooler=pooler)
    return pooler


def pool(
    model: Any,
    forward: Forward,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    logits_to_keep: torch.Tensor | None = None,
    **rest: Any,
) -> CausalLMOutput:
    """input_ids and position_ids int64 [1, tokens] → in place of logits vectors or scores, float32 [1,
    prompts, size]; hidden states where it is not said what is kept, as in a probe
    """
    pooler = model.prompt_pooler
    taken = {"input_ids": input_ids, "position_ids": position_ids + pooler.first_position}
    if pooler.has_types and logits_to_keep is not None:
        types = np.concatenate([token_types(part) for part in pooler.slices])
        taken["token_type_ids"] = to_device(types[None], input_ids.device, torch.int64)
    encoded: Any = model.base_model(**taken) if pooler.is_classifier else forward(model, **taken)
    states = encoded.last_hidden_state
    return CausalLMOutput(logits=states if logits_to_keep is None else pooler(states[0])[None])


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
