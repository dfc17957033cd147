"""Medusa heads and MLP speculators: what they propose is what their formulas say of the model's last hidden
state; right proposals are accepted, and no proposal changes an id.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from common.settings.settings import SettingError
from tests.support.engine import tiny_models
from tests.support.engine.tiny_models import FAMILIES, VOCAB
from tests.support.parameters.slow_but import slow_but
from tests.support.speculation.counting_models import (
    SIZE,
    medusa_tensors,
    mlp_tensors,
    right_heads,
    save_counting_model,
    save_heads,
)
from tests.support.speculation.drafts import ROWS, drafting_engine, noted_drafts, play_rows

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


@pytest.mark.parametrize("kind", slow_but(["medusa", "mlp-tied"], KINDS))
def test_heads_propose_what_their_formula_says(kind: str, tmp_path: Path) -> None:
    """Whatever the way to a state: batched, in chunks, resumed. The ids are those of the plain way."""
    config, tensors = KINDS[kind]
    model = tiny_models.save(tmp_path / "model", *FAMILIES["Llama"])
    heads = save_heads(tmp_path / "heads", config, tensors)
    engine = drafting_engine(tmp_path / "model", {"model": str(heads)})
    assert engine.drafter and engine.drafter.num_drafted == NUM_HEADS
    engine.costs.set(1.0, 0.0, 0.0, 0.0)
    noted = noted_drafts(engine)
    plain = play_rows(drafting_engine(tmp_path / "model", None))
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


@pytest.mark.parametrize("kind", ["medusa", "mlp"])
def test_right_heads_are_nearly_always_accepted(kind: str, tmp_path: Path) -> None:
    """The heads are named in the model's own config.json, as TGI has it."""
    save_counting_model(tmp_path / "model")
    save_heads(tmp_path / "model" / "heads", *right_heads(NUM_HEADS)[kind])
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"speculator": {"path": "heads"}}))
    plain = play_rows(drafting_engine(tmp_path / "model", None), rows=dict.fromkeys(ROWS), vocab_size=SIZE)
    engine = drafting_engine(tmp_path / "model", None, speculate=NUM_HEADS)
    assert engine.drafter and engine.drafter.method.startswith(kind)
    drafted = play_rows(engine, rows=dict.fromkeys(ROWS), vocab_size=SIZE, lead=64)
    assert drafted.answer == plain.answer
    assert drafted.num_proposed > 60 and drafted.share_right > 0.95


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


def test_more_tokens_than_heads_are_refused(tmp_path: Path) -> None:
    tiny_models.save(tmp_path / "model", *FAMILIES["Llama"])
    heads = str(save_heads(tmp_path / "heads", *KINDS["medusa"]))
    for speculative, cause in (
        ({"model": heads, "num_speculative_tokens": 4}, "is 4, but it has 3 heads"),
        ({"model": heads, "method": "eagle3"}, "method is eagle3, but"),
    ):
        with pytest.raises(SettingError) as error:
            drafting_engine(tmp_path / "model", speculative)
        assert cause in error.value.cause
