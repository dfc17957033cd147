"""Medusa heads, MLP speculators and EAGLE-3: what they propose is what their formulas say of the model's
hidden states, and no proposal changes an id.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from common.settings.settings import SettingError
from gpu_worker.engine.cpu import native
from gpu_worker.engine.cpu.fused_layer import FusedLayers
from tests.support.engine import tiny_models
from tests.support.engine.tiny_models import FAMILIES, VOCAB
from tests.support.parameters.slow_but import slow_but
from tests.support.speculation.counting_models import (
    eagle_tensors,
    medusa_tensors,
    mlp_tensors,
    save_heads,
)
from tests.support.speculation.drafts import drafting_engine, noted_drafts, play_rows

HIDDEN, INNER, NUM_HEADS = 64, 32, 3
Tensors = dict[str, torch.Tensor]
MEDUSA = {"medusa_num_heads": NUM_HEADS, "medusa_num_layers": 2, "base_model_name_or_path": "m"}
VLLM_MEDUSA = {"model_type": "medusa", "num_heads": NUM_HEADS, "num_hidden_layers": 1}
MLP = {
    "model_type": "mlp_speculator",
    "architectures": ["MLPSpeculatorPreTrainedModel"],
    "n_predict": NUM_HEADS,
    "emb_dim": HIDDEN,
    "inner_dim": INNER,
    "vocab_size": VOCAB,
}
KINDS: dict[str, tuple[dict[str, Any], Tensors]] = {
    "medusa": (MEDUSA, medusa_tensors(HIDDEN, VOCAB, NUM_HEADS, layers=2)),
    "medusa-vllm": (VLLM_MEDUSA, medusa_tensors(HIDDEN, VOCAB, NUM_HEADS, vllm=True)),
    "mlp": (MLP, mlp_tensors(HIDDEN, INNER, VOCAB, NUM_HEADS, tied=False)),
    "mlp-tied": (
        MLP | {"tie_weights": True, "scale_input": True},
        mlp_tensors(HIDDEN, INNER, VOCAB, NUM_HEADS, tied=True),
    ),
}


def medusa_ids(tensors: Tensors, state: torch.Tensor) -> list[int]:
    """What heads propose after a hidden state [hidden], by Medusa's formula."""
    ids = []
    for head in range(NUM_HEADS):
        hidden = state
        for layer in range(2):
            name = f"{head}.{layer}.linear" if f"{head}.{layer}.linear.bias" in tensors else ""
            name = name or f"blocks.{head}.layers.{layer}"
            if f"{name}.bias" in tensors:
                linear = tensors[f"{name}.weight"] @ hidden + tensors[f"{name}.bias"]
                hidden = hidden + functional.silu(linear)
        last = tensors.get(f"{head}.2.weight", tensors.get(f"lm_heads.{head}.weight"))
        assert last is not None
        ids.append(int((last @ hidden).argmax()))
    return ids


def mlp_ids(tensors: Tensors, state: torch.Tensor, token: int, tied: bool) -> list[int]:
    """What the heads propose after a hidden state [hidden] and the token that it gave, by TGI's formula."""
    weight = 0.5 ** (0.5 / NUM_HEADS)
    token_weight = math.sqrt(1 - weight**2) * math.sqrt(INNER / 2)
    ids = []
    if tied:  # with scale_input
        state = state * torch.rsqrt(state.pow(2).mean() + 1e-6) / math.sqrt(2)
    for head in range(NUM_HEADS):
        part = 0 if tied else head
        projected = tensors[f"speculator.proj.{min(head, 1) if tied else head}.weight"] @ state
        mixed = projected * weight + tensors[f"speculator.emb.{part}.weight"][token] * token_weight
        normed = mixed * torch.rsqrt(mixed.pow(2).mean() + 1e-6)
        scaled = normed * tensors[f"speculator.ln.{part}.weight"] + tensors[f"speculator.ln.{part}.bias"]
        state = functional.gelu(scaled)
        token = int((tensors[f"speculator.head.{part}.weight"] @ state).argmax())
        ids.append(token)
    return ids


@pytest.mark.parametrize("kind", slow_but(["mlp-tied"], KINDS))
def test_heads_propose_what_their_formula_says(kind: str, tmp_path: Path) -> None:
    """Whatever the way to a state: batched, in chunks, resumed. The ids are those of the plain way.

    MLP heads are named in the model's own config.json, as TGI has it.
    """
    config, tensors = KINDS[kind]
    model = tiny_models.save(tmp_path / "model", *FAMILIES["Llama"])
    plain = play_rows(drafting_engine(tmp_path / "model", None))
    heads = save_heads(tmp_path / "model" / "heads", config, tensors)
    if kind.startswith("mlp"):
        path = tmp_path / "model" / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"speculator": {"path": "heads"}}))
        engine = drafting_engine(tmp_path / "model", None, speculate=NUM_HEADS)
    else:
        engine = drafting_engine(tmp_path / "model", {"model": str(heads)})
    assert engine.drafter and engine.drafter.num_drafted == NUM_HEADS
    engine.costs.set(1.0, 0.0, 0.0, 0.0)
    noted = noted_drafts(engine)
    assert play_rows(engine).answer == plain.answer
    assert play_rows(engine, prefill_tokens=7, lead=1, horizon=2).answer == plain.answer
    shown = {row: ids[:9] for row, ids in plain.ids.items()}
    resumed = play_rows(engine, shown).ids
    assert {row: shown[row] + ids for row, ids in resumed.items()} == plain.ids
    assert len(noted) > 40
    for ids, drafts in noted[:: len(noted) // 20]:
        with torch.inference_mode():
            output = model(torch.tensor([ids[:-1]]), output_hidden_states=True)
        state = output.hidden_states[-1][0, -1]
        expected = (
            mlp_ids(tensors, state, ids[-1], tied=kind == "mlp-tied")
            if kind.startswith("mlp")
            else medusa_ids(tensors, state)
        )
        assert drafts == expected[: len(drafts)]


@pytest.mark.parametrize(
    ("config", "changed", "cause"),
    [
        (MEDUSA, {"1.1.linear.weight": None}, "there are no weights 1.1.linear.weight"),
        (MEDUSA, {"2.2.weight": torch.zeros(7, 7)}, "2.2.weight has the shape [7, 7], and [500, 64] is"),
        (MEDUSA | {"medusa_num_heads": "x"}, {}, "its config.json has no medusa_num_heads"),
        (MLP | {"vocab_size": 7}, {}, "its vocab_size is 7, and the model's 500"),
        (MLP | {"emb_dim": 7}, {}, "its emb_dim is 7, and the model's 64"),
        (MLP | {"inner_dim": None, "n_predict": None}, {}, "its config.json has no n_predict and inner_dim"),
        ({"architectures": ["EagleLlama"]}, {}, "EagleLlama is no kind of heads that is served"),
    ],
)
def test_heads_that_do_not_fit_are_refused_by_name(
    config: dict[str, Any], changed: dict[str, torch.Tensor | None], cause: str, tmp_path: Path
) -> None:
    tiny_models.save(tmp_path / "model", *FAMILIES["Llama"])
    tensors = {**KINDS["medusa"][1], **changed}
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    heads = save_heads(tmp_path / "heads", config, given)
    with pytest.raises(SettingError) as error:
        drafting_engine(tmp_path / "model", {"model": str(heads)})
    assert error.value.name == "speculative_config" and cause in error.value.cause


EAGLE_INNER, DRAFT_VOCAB, HEADS, KV_HEADS = 96, 100, 4, 2
HEAD_DIM, EPSILON, NUM_DRAFTED = 16, 1e-6, 3
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": EAGLE_INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "vocab_size": VOCAB,
    "draft_vocab_size": DRAFT_VOCAB,
    "rms_norm_eps": EPSILON,
    "max_position_embeddings": 256,
}


def offsets() -> torch.Tensor:
    """int64 [DRAFT_VOCAB]: each fifth token of the model."""
    return torch.arange(DRAFT_VOCAB) * 4


def rms(states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + EPSILON)


def layer(
    tensors: Tensors, embedded: torch.Tensor, states: torch.Tensor, rotary: Any, before: bool
) -> torch.Tensor:
    """EAGLE-3's layer over all positions at once: embedded and states [tokens, hidden] → states."""
    normed = rms(states, tensors["midlayer.hidden_norm.weight"])
    mixed = torch.cat((rms(embedded, tensors["midlayer.input_layernorm.weight"]), normed), -1)
    query, key, value = (
        (mixed @ tensors[f"midlayer.self_attn.{name}_proj.weight"].T).view(1, len(mixed), -1, HEAD_DIM)
        for name in "qkv"
    )
    rotation = rotary(mixed, torch.arange(len(mixed))[None])
    query, key = apply_rotary_pos_emb(query.transpose(1, 2), key.transpose(1, 2), *rotation)
    key, value = (one.repeat_interleave(HEADS // KV_HEADS, 1) for one in (key, value.transpose(1, 2)))
    attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    output = attended.transpose(1, 2).reshape(len(mixed), -1)
    residual = (normed if before else states) + output @ tensors["midlayer.self_attn.o_proj.weight"].T
    inner = rms(residual, tensors["midlayer.post_attention_layernorm.weight"])
    gate = functional.silu(inner @ tensors["midlayer.mlp.gate_proj.weight"].T)
    up = inner @ tensors["midlayer.mlp.up_proj.weight"].T
    return residual + (gate * up) @ tensors["midlayer.mlp.down_proj.weight"].T


@torch.inference_mode()
def expected_drafts(
    model: Any, tensors: Tensors, ids: list[int], count: int, layers: tuple[int, ...], before: bool
) -> list[int]:
    """What the layer proposes after these ids, computed without a cache."""
    hidden = model(torch.tensor([ids[:-1]]), output_hidden_states=True).hidden_states
    states = torch.cat([hidden[number][0] for number in layers], -1) @ tensors["fc.weight"].T
    known, drafts = list(ids), list[int]()
    for _ in range(count):
        embedded = model.get_input_embeddings()(torch.tensor(known[1:]))
        given = layer(tensors, embedded, states, model.model.rotary_emb, before)
        scores = rms(given[-1], tensors["norm.weight"]) @ tensors["lm_head.weight"].T
        place = int(scores.argmax())
        drafts.append(place + int(offsets()[place]))
        known.append(drafts[-1])
        states = torch.cat((states, given[-1:]))
    return drafts


WAYS: dict[str, tuple[dict[str, Any], tuple[int, ...], bool]] = {
    "eagle": ({}, (2, 1, 0), False),
    "named-layers": ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}, (0, 1, 2), False),
    "norm-before": ({"norm_before_residual": True}, (2, 1, 0), True),
}


@pytest.mark.parametrize("way", slow_but(["norm-before"], WAYS))
def test_the_layer_proposes_what_its_formula_says(way: str, tmp_path: Path) -> None:
    """Whatever the way to a state: batched, in chunks, resumed. The ids are those of the plain way."""
    changed, layers, before = WAYS[way]
    tensors = eagle_tensors(HIDDEN, EAGLE_INNER, DRAFT_VOCAB) | {"d2t": offsets()}
    model = tiny_models.save(tmp_path / "model", *FAMILIES["Llama"])
    head = save_heads(tmp_path / "head", CONFIG | changed, tensors)
    speculative = {"model": str(head), "num_speculative_tokens": NUM_DRAFTED}
    engine = drafting_engine(tmp_path / "model", speculative)
    engine.costs.set(1.0, 0.0, 0.0, 0.0)
    noted = noted_drafts(engine)
    plain = play_rows(drafting_engine(tmp_path / "model", None))
    assert play_rows(engine).answer == plain.answer
    assert play_rows(engine, prefill_tokens=7, lead=1, horizon=2).answer == plain.answer
    shown = {row: ids[:9] for row, ids in plain.ids.items()}
    resumed = play_rows(engine, shown).ids
    assert {row: shown[row] + ids for row, ids in resumed.items()} == plain.ids
    assert len(noted) > 40
    fused = [isinstance(one.forward, FusedLayers) for one in engine.loaded.model.model.layers]
    assert not native.library() or fused == [True] * 3, "each captured layer begins a native call"
    for ids, drafts in noted[:: len(noted) // 20]:
        assert drafts == expected_drafts(model, tensors, ids, len(drafts), layers, before)


@pytest.mark.parametrize(
    ("config", "changed", "cause"),
    [
        ({}, {"fc.weight": None}, "there are no weights fc.weight"),
        ({}, {"d2t": torch.arange(DRAFT_VOCAB) * 9}, "d2t does not name 100 of the model's 500 tokens"),
        ({"num_hidden_layers": 2}, {}, "its num_hidden_layers is 2, and only 1 is served for EAGLE-3"),
        ({"target_hidden_size": 32}, {}, "its target_hidden_size is 32, and the model's 64"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 9]}, {}, "it takes states of layers [0, 1, 9]"),
    ],
)
def test_a_layer_that_does_not_fit_is_refused_by_name(
    config: dict[str, Any], changed: dict[str, torch.Tensor | None], cause: str, tmp_path: Path
) -> None:
    tiny_models.save(tmp_path / "model", *FAMILIES["Llama"])
    tensors = {**eagle_tensors(HIDDEN, EAGLE_INNER, DRAFT_VOCAB), "d2t": offsets(), **changed}
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    head = save_heads(tmp_path / "head", CONFIG | config, given)
    with pytest.raises(SettingError) as error:
        drafting_engine(tmp_path / "model", {"model": str(head), "num_speculative_tokens": 2})
    assert error.value.name == "speculative_config" and cause in error.value.cause
