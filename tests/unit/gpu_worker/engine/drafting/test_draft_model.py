"""Draft models, and heads and layers that draft: rows have the ids of the plain way, and proposals are what a
formula says.
"""

import json
import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from api.grammar.compile import Grammar, compile_unchecked
from common.messages.request import SamplingParams
from common.settings.settings import SettingError
from gpu_worker.engine.cpu import native
from gpu_worker.engine.cpu.fused_layer import FusedLayers
from gpu_worker.engine.drafting.proposers import Proposer
from gpu_worker.engine.engine import Engine
from tests.support.engine import tiny_models
from tests.support.engine.batch_player import Player, player
from tests.support.engine.drafts import (
    NEW_TOKENS,
    NUM_DRAFTED,
    drafting_engine,
    eagle_tensors,
    medusa_tensors,
    mlp_tensors,
    noted_drafts,
    play_drafts,
    save_heads,
)
from tests.support.engine.tiny_engine import BATCHED, CHUNKED, SCARCE, check_ways, prompts
from tests.support.engine.tiny_models import FAMILIES, LLAMA, VOCAB
from tests.support.parameters.slow_but import slow_but

OTHER = LLAMA | {"num_hidden_layers": 1, "num_key_value_heads": 1, "hidden_size": 32}
"""Another model with the same vocabulary: its proposals are wrong."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_models.save(folder, *FAMILIES["Llama"])
    return folder


@pytest.fixture(scope="module")
def plain(folder: Path) -> Player:
    return play_drafts(drafting_engine(folder, None))


@pytest.fixture(scope="module")
def equal(folder: Path) -> Engine:
    return drafting_engine(folder, {"model": str(folder), "num_speculative_tokens": NUM_DRAFTED})


@pytest.fixture(scope="module")
def other(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    draft = tmp_path_factory.mktemp("draft")
    tiny_models.save(draft, "Llama", OTHER)
    return drafting_engine(folder, {"model": str(draft), "num_speculative_tokens": NUM_DRAFTED})


@pytest.fixture(params=["equal", "other"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine: Engine = request.getfixturevalue(request.param)
    yield engine
    engine.runs_ahead = False


def test_rows_are_told_what_they_are_told_the_plain_way(engine: Engine, plain: Player) -> None:
    """Also where steps may be launched ahead."""
    check_ways(partial(play_drafts, engine), plain, BATCHED, CHUNKED, SCARCE)
    engine.runs_ahead = True
    assert play_drafts(engine).answer == plain.answer


@pytest.mark.parametrize(
    "way", slow_but(["chunked", "resumed"], ["batched", "chunked", "ahead", "resumed", "scarce"])
)
def test_an_equal_model_is_nearly_always_right(equal: Engine, plain: Player, way: str) -> None:
    """Greedy and sampled, with penalties, too. A few proposals go beyond the end of their answer."""
    equal.runs_ahead = way == "ahead"
    shown = {row: ids[:9] for row, ids in plain.ids.items()} if way == "resumed" else None
    lead, horizon = (6, 2) if way == "scarce" else (64, 4)
    prefill_tokens = 7 if way == "chunked" else 1000
    played = play_drafts(equal, shown=shown, prefill_tokens=prefill_tokens, lead=lead, horizon=horizon)
    equal.runs_ahead = False
    assert played.num_proposed > 60 and played.share_right > 0.97
    assert played.num_row_steps <= sum(map(len, played.ids.values())) / (2 if way == "scarce" else 3)


def second_turn(engine: Engine) -> tuple[Player, Player]:
    """Rows that start with blocks of others, and the same rows without them."""
    played, rows = player(engine), [2, 3]
    played.kept = {*played.free}
    first = [played.start(row, prompts()[row], NEW_TOKENS, ignore_eos=True) for row in rows]
    tables = {row: played.rows[row].blocks for row in rows}
    answers = {row: list(ids) for row, ids in played.run(first).items()}
    behind, anew = player(engine), player(engine)
    behind.free = [*played.free]
    turns = {row: [*prompts()[row], *answers[row], 5] for row in rows}
    cached = {row: tables[row][: (len(ids) - 1) // engine.block_size] for row, ids in turns.items()}
    for one, blocks in ((behind, cached), (anew, {row: list[int]() for row in rows})):
        one.until = engine.rows.step
        starts = [one.start_behind(blocks[row], row, turns[row], NEW_TOKENS, ignore_eos=True) for row in rows]
        one.run(starts, lead=64)
    return behind, anew


@pytest.mark.parametrize("paused", [pytest.param(False, marks=pytest.mark.slow), True])
def test_rows_that_start_with_blocks_of_others_draft_as_well(
    equal: Engine, paused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the rows before them did not draft, so that their blocks have no K and V of the draft."""
    monkeypatch.setattr(equal.rows, "prefix_caching", True)
    if paused:
        pause_first_rows(equal, monkeypatch)
    behind, anew = second_turn(equal)
    assert behind.ids == anew.ids
    assert behind.num_proposed > 30 and behind.share_right > 0.9


def pause_first_rows(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first two rows that start propose nothing."""
    make, numbers = engine.rows.make_proposer, count()
    assert make

    def paused(*arguments: Any) -> Proposer | None:
        proposer = make(*arguments)
        assert proposer
        proposer.acceptance.pause = 2 * NEW_TOKENS if next(numbers) < 2 else 0
        return proposer

    monkeypatch.setattr(engine.rows, "make_proposer", paused)


def test_a_row_whose_drafts_do_not_pay_pauses(other: Engine) -> None:
    other.costs.set(1.0, 0.3, 0.1, 0.0)
    played = play_drafts(other, new_tokens=100)
    assert played.num_proposed < sum(map(len, played.ids.values())) / 2


def test_it_drafts_again_after_a_sleep(equal: Engine, plain: Player) -> None:
    equal.sleep()
    equal.wake_up(lambda _: None)
    played = play_drafts(equal, lead=64)
    assert played.answer == plain.answer and played.share_right > 0.97


def test_a_draft_model_that_cannot_serve_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    def refusal(config: dict[str, object]) -> str:
        with pytest.raises(SettingError) as error:
            drafting_engine(folder, {"num_speculative_tokens": 2} | config)
        assert error.value.name == "speculative_config"
        return error.value.cause

    (tmp_path / "small").mkdir()
    tiny_models.save(tmp_path / "small", "Llama", OTHER | {"vocab_size": 400})
    assert "its vocabulary has 400 tokens, and 500" in refusal({"model": str(tmp_path / "small")})
    (tmp_path / "damaged").mkdir()
    tiny_models.save(tmp_path / "damaged", "Llama", OTHER)
    weights = tmp_path / "damaged" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "model.safetensors is damaged" in refusal({"model": str(tmp_path / "damaged")})
    assert "does not exist" in refusal({"model": str(tmp_path / "missing")})


WORDS = compile_unchecked(Grammar("regex", r'\{"name": "[a-z ]{60,90}"\}', "f"))
HOT = SamplingParams(temperature=1.3, seed=5, grammar=WORDS)
GUIDED: dict[int, SamplingParams | None] = {0: SamplingParams(grammar=WORDS), 1: HOT, 2: HOT, 3: None}


def play_guided(engine: Engine, **how: Any) -> Player:
    engine.matchers.waits = True
    return play_drafts(engine, GUIDED, lead=64, **how)


@pytest.fixture(scope="module")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save_with_tokenizer(tmp_path_factory.mktemp("model"), "Llama", tiny_models.SPEAKING)


@pytest.fixture(scope="module")
def plain_words(speaking: Path) -> Player:
    engine = drafting_engine(speaking, None)
    engine.rows.make_proposer = None
    return play_guided(engine)


@pytest.mark.parametrize(
    ("config", "is_right"),
    [
        ({"model": ""}, True),
        pytest.param({"method": "ngram"}, False, marks=pytest.mark.slow),
        pytest.param({"method": "suffix"}, False, marks=pytest.mark.slow),
    ],
)
def test_rows_with_a_grammar_have_the_ids_of_the_plain_way(
    speaking: Path, plain_words: Player, config: dict[str, Any], is_right: bool
) -> None:
    """An equal model is nearly always right: its drafts are masked, too. Guesses are cut."""
    if "model" in config:
        config = {"model": str(speaking)}
    engine = drafting_engine(speaking, config | {"num_speculative_tokens": 4})
    drafted = play_guided(engine)
    assert drafted.answer == plain_words.answer
    assert drafted.num_proposed > 0
    if is_right:
        assert drafted.share_right > 0.95
        assert drafted.num_row_steps < plain_words.num_row_steps / 2
    check_ways(partial(play_guided, engine), plain_words)


# --- draft heads --------------------------------------------------------------------------------------------

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
    plain = play_drafts(drafting_engine(tmp_path / "model", None))
    heads = save_heads(tmp_path / "model" / "heads", config, tensors)
    if kind.startswith("mlp"):
        path = tmp_path / "model" / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"speculator": {"path": "heads"}}))
        engine = drafting_engine(tmp_path / "model", None, speculate=NUM_HEADS)
    else:
        engine = drafting_engine(tmp_path / "model", {"model": str(heads)})
    assert engine.drafter and engine.drafter.num_drafted == NUM_HEADS

    @torch.inference_mode()
    def expected(ids: list[int]) -> list[int]:
        output = model(torch.tensor([ids[:-1]]), output_hidden_states=True)
        state = output.hidden_states[-1][0, -1]
        if kind.startswith("mlp"):
            return mlp_ids(tensors, state, ids[-1], tied=kind == "mlp-tied")
        return medusa_ids(tensors, state)

    check_drafts(engine, plain, expected)


def check_drafts(engine: Engine, plain: Player, expected: Callable[[list[int]], list[int]]) -> None:
    """Rows are told the same as the plain ones, and what is drafted after ids is expected."""
    engine.costs.set(1.0, 0.0, 0.0, 0.0)
    noted = noted_drafts(engine)
    check_ways(partial(play_drafts, engine), plain, BATCHED, CHUNKED)
    assert len(noted) > 40
    for ids, drafts in noted[:: len(noted) // 20]:
        assert drafts == expected(ids)[: len(drafts)]


EAGLE_INNER, DRAFT_VOCAB, HEADS, KV_HEADS = 96, 100, 4, 2
HEAD_DIM, EPSILON, NUM_BY_HEADS = 16, 1e-6, 3
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
    model: Any, tensors: Tensors, ids: list[int], layers: tuple[int, ...], before: bool
) -> list[int]:
    """What the layer proposes after these ids, computed without a cache."""
    hidden = model(torch.tensor([ids[:-1]]), output_hidden_states=True).hidden_states
    states = torch.cat([hidden[number][0] for number in layers], -1) @ tensors["fc.weight"].T
    known, drafts = list(ids), list[int]()
    for _ in range(NUM_BY_HEADS):
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
    speculative = {"model": str(head), "num_speculative_tokens": NUM_BY_HEADS}
    engine = drafting_engine(tmp_path / "model", speculative)
    plain = play_drafts(drafting_engine(tmp_path / "model", None))
    check_drafts(engine, plain, lambda ids: expected_drafts(model, tensors, ids, layers, before))
    fused = [isinstance(one.forward, FusedLayers) for one in engine.loaded.model.model.layers]
    assert not native.library() or fused == [True] * 3, "each captured layer begins a native call"


REFUSED: list[tuple[dict[str, Any], dict[str, torch.Tensor | None], str]] = [
    (MEDUSA, {"1.1.linear.weight": None}, "there are no weights blocks.1.1.weight"),
    (MEDUSA, {"2.2.weight": torch.zeros(7, 7)}, "size mismatch for heads.2.weight: "),
    (MEDUSA | {"medusa_num_heads": "x"}, {}, "its config.json has no medusa_num_heads"),
    (MLP | {"vocab_size": 7}, {}, "its vocab_size is 7, and the model's 500"),
    (MLP | {"emb_dim": 7}, {}, "its emb_dim is 7, and the model's 64"),
    (MLP | {"inner_dim": None, "n_predict": None}, {}, "its config.json has no n_predict and inner_dim"),
    ({"architectures": ["EagleLlama"]}, {}, "EagleLlama is no kind of heads that is served"),
    (CONFIG, {"fc.weight": None}, "there are no weights fc.weight"),
    (CONFIG, {"d2t": torch.arange(DRAFT_VOCAB) * 9}, "d2t does not name 100 of the model's 500 tokens"),
    (CONFIG | {"num_hidden_layers": 2}, {}, "its num_hidden_layers is 2, and only 1 is served for EAGLE-3"),
    (CONFIG | {"target_hidden_size": 32}, {}, "its target_hidden_size is 32, and the model's 64"),
    (CONFIG | {"eagle_aux_hidden_state_layer_ids": [0, 1, 9]}, {}, "it takes states of layers [0, 1, 9]"),
]


@pytest.mark.parametrize(("config", "changed", "cause"), REFUSED)
def test_heads_that_do_not_fit_are_refused_by_name(
    config: dict[str, Any], changed: dict[str, torch.Tensor | None], cause: str, tmp_path: Path
) -> None:
    tiny_models.save(tmp_path / "model", *FAMILIES["Llama"])
    is_layer = config.get("architectures") == CONFIG["architectures"]
    layer = {**eagle_tensors(HIDDEN, EAGLE_INNER, DRAFT_VOCAB), "d2t": offsets()}
    tensors = {**(layer if is_layer else KINDS["medusa"][1]), **changed}
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    heads = save_heads(tmp_path / "heads", config, given)
    how = {"model": str(heads)} | ({"num_speculative_tokens": 2} if is_layer else {})
    with pytest.raises(SettingError) as error:
        drafting_engine(tmp_path / "model", how)
    assert error.value.name == "speculative_config" and cause in error.value.cause
