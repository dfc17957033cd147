"""Models that count, heads and models that draft, and rows played on engines that check drafts."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from common.messages.request import SamplingParams
from common.settings.settings import Settings
from gpu_worker.engine.engine import Engine
from tests.support.engine import tiny_models
from tests.support.engine.batch_player import Player
from tests.support.engine.tiny_engine import SETTINGS, play_rows, prompts
from tests.support.engine.tiny_models import LLAMA

SIZE = 64
"""Of the vocabulary and of hidden states."""
COUNTING = LLAMA | {"vocab_size": SIZE, "hidden_size": SIZE}


def permutation() -> torch.Tensor:
    """int64 [SIZE]: what follows each token; one cycle without the ids that end a row."""
    follows = torch.arange(SIZE).roll(-1)
    follows[SIZE - 1] = 3
    return follows


def matrix(power: int = 1) -> torch.Tensor:
    """float32 [SIZE, SIZE]: of a one-hot vector of a token → scores, highest for what follows it."""
    token = torch.arange(SIZE)
    for _ in range(power):
        token = permutation()[token]
    scores = torch.zeros(SIZE, SIZE)
    scores[token, torch.arange(SIZE)] = 1.0
    return scores


def save_counting_model(folder: Path, **sizes: Any) -> Any:
    """Its layers add nothing; embeddings are one-hot."""
    model = tiny_models.save(folder, "Llama", COUNTING | sizes)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(SIZE))
        model.model.norm.weight.fill_(1)
        model.lm_head.weight.copy_(matrix())
    model.save_pretrained(folder)
    return model


def save_heads(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def medusa_tensors(
    hidden: int, vocab: int, num_heads: int, vllm: bool = False, layers: int = 1
) -> dict[str, torch.Tensor]:
    """Random heads, as Medusa and TGI name them, or as vLLM does."""
    torch.manual_seed(5)
    tensors: dict[str, torch.Tensor] = {}
    for head in range(num_heads):
        for layer in range(layers):
            name = f"blocks.{head}.layers.{layer}" if vllm else f"{head}.{layer}.linear"
            tensors[f"{name}.weight"] = torch.randn(hidden, hidden) * 0.2
            tensors[f"{name}.bias"] = torch.randn(hidden) * 0.2
        last = f"lm_heads.{head}" if vllm else f"{head}.{layers}"
        tensors[f"{last}.weight"] = torch.randn(vocab, hidden) * 0.2
    return tensors


def mlp_tensors(hidden: int, inner: int, vocab: int, num_heads: int, tied: bool) -> dict[str, torch.Tensor]:
    """Random weights of an MLP speculator."""
    torch.manual_seed(6)
    tensors: dict[str, torch.Tensor] = {}
    for head in range(1 if tied else num_heads):
        tensors[f"speculator.emb.{head}.weight"] = torch.randn(vocab, inner)
        tensors[f"speculator.head.{head}.weight"] = torch.randn(vocab, inner) * 0.2
        tensors[f"speculator.ln.{head}.weight"] = torch.rand(inner) + 0.5
        tensors[f"speculator.ln.{head}.bias"] = torch.randn(inner) * 0.2
    for head in range(min(2, num_heads) if tied else num_heads):
        tensors[f"speculator.proj.{head}.weight"] = torch.randn(inner, inner if head else hidden) * 0.2
    return tensors


def eagle_tensors(hidden: int, inner: int, vocab: int) -> dict[str, torch.Tensor]:
    """A random layer with a vocabulary of its own of `vocab` tokens; its K and V have 32 numbers."""
    torch.manual_seed(7)
    shapes = {
        "fc": (hidden, 3 * hidden),
        "midlayer.self_attn.q_proj": (hidden, 2 * hidden),
        "midlayer.self_attn.k_proj": (32, 2 * hidden),
        "midlayer.self_attn.v_proj": (32, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, hidden),
        "midlayer.mlp.gate_proj": (inner, hidden),
        "midlayer.mlp.up_proj": (inner, hidden),
        "midlayer.mlp.down_proj": (hidden, inner),
        "lm_head": (vocab, hidden),
    }
    tensors = {f"{name}.weight": torch.randn(shape) * 0.2 for name, shape in shapes.items()}
    norms = ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm")
    return tensors | {f"{name}.weight": torch.rand(hidden) + 0.5 for name in norms}


def right_heads(num_heads: int) -> dict[str, torch.Tensor]:
    """The weights of Medusa's heads that are always right about the counting model."""
    heads = {
        "0.linear.weight": torch.zeros(SIZE, SIZE),
        "0.linear.bias": torch.zeros(SIZE),
    }
    tensors = {f"{head}.{name}": one.clone() for head in range(num_heads) for name, one in heads.items()}
    return tensors | {f"{head}.1.weight": matrix(head + 2) for head in range(num_heads)}


# --- drafts -------------------------------------------------------------------------------------------------

NUM_DRAFTED = 4
NEW_TOKENS = 40
SEEDED = SamplingParams(temperature=0.7, seed=11)
ROWS: dict[int, SamplingParams | None] = {
    0: None,
    1: SEEDED,
    2: replace(SEEDED, top_p=0.8, repetition_penalty=1.3, frequency_penalty=0.3),
    3: SamplingParams(repetition_penalty=1.2, logit_bias=[(7, 3.0)]),
}
"""Sampling parameters of row n."""


def engine_settings(folder: Path, speculative: dict[str, Any] | None, **settings: Any) -> dict[str, Any]:
    config = json.dumps(speculative) if speculative else None
    return SETTINGS | {"model_id": str(folder), "block_size": 16, "speculative_config": config} | settings


def drafting_engine(folder: Path, speculative: dict[str, Any] | None, **settings: Any) -> Engine:
    """An engine in which drafts cost next to nothing, so that it always drafts."""
    engine = Engine(Settings(**engine_settings(folder, speculative, **settings)))
    engine.costs.set(1.0, 0.01, 0.0, 0.0)
    return engine


def play_drafts(engine: Any, rows: Mapping[int, SamplingParams | None] = ROWS, **how: Any) -> Player:
    """Play rows with these sampling parameters."""
    params = {row: {"sampling": sampling, "top_n_tokens": row % 3} for row, sampling in rows.items()}
    return play_rows(engine, dict(enumerate(prompts())), params=params, **{"new_tokens": NEW_TOKENS} | how)


def noted_drafts(engine: Engine) -> list[tuple[list[int], list[int]]]:
    """(ids so far, drafts) of greedy rows, as they are made."""
    noted: list[tuple[list[int], list[int]]] = []
    assert engine.drafter
    take: Callable[[torch.Tensor], None] = engine.drafter.take

    def note(drafts: torch.Tensor) -> None:
        assert engine.drafter
        take(drafts)
        for one in engine.drafter.asked:
            text = one.proposer.text
            if one.row.sampling_state is None and one.proposer.drafted:
                noted.append((text.known[: text.length].tolist(), list(one.proposer.drafted)))

    engine.drafter.take = note  # type: ignore[method-assign]
    return noted
