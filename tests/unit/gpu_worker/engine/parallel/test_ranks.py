"""One model on several ranks, which share each layer or have some of the layers each: the ids of
transformers' `generate` and of one rank, whatever is asked of the rows; or a refusal.

Ranks that meet, or do not; links between those that have met; their model must be the same.
Which part of a model each rank has: shares of heads and matrices, and stages of layers.
"""

import json
import queue
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from api.grammar.compile import Grammar, compile_unchecked
from common.messages.records import unpack_floats
from common.messages.request import BeamParams, LogitsParams, SamplingParams
from common.rank import RankInfo
from common.settings.settings import SettingError, Settings
from gpu_worker.engine.attention.backend import LayerSpec
from gpu_worker.engine.attention.choose import check_probe
from gpu_worker.engine.model import warmup
from gpu_worker.engine.model.load import check_same, describe_model
from gpu_worker.engine.parallel.communicator import Communicator
from gpu_worker.engine.parallel.model_parallel import ModelStage, checked_layers, make_tp_plan, split_layers
from gpu_worker.engine.parallel.rendezvous import Member, RankLinks, RankLost, RendezvousFailed, connect_ranks
from gpu_worker.protocol import AdapterAnswer, SetAdapter, UnservableModel
from tests.support.adapters.tiny_adapters import (
    LINEARS,
    change_config,
    check_adapters,
    load_adapters,
    save_adapter,
)
from tests.support.engine import multi_rank_engine, quantized_models, tiny_models
from tests.support.engine.batch_player import Player, player
from tests.support.engine.drafts import drafting_engine, engine_settings, play_drafts
from tests.support.engine.multi_rank_engine import Led, check_ids
from tests.support.engine.pictures.models import SETTINGS as SEEING_SETTINGS
from tests.support.engine.pictures.models import Seeing
from tests.support.engine.quantized_models import FORMATS, keeps_blocks
from tests.support.engine.tiny_engine import NEW_TOKENS, SETTINGS, answers, engine_of, play, prompts
from tests.support.engine.tiny_models import FAMILIES, HYBRIDS, LLAMA, VOCAB
from tests.support.machine.ports import free_port
from tests.support.parameters.slow_but import slow_but
from tests.support.pooling.pooled_rows import pool_rows
from tests.support.waiting import wait_until_sync

THREE_HEADS = LLAMA | {
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "hidden_size": 96,
    "tie_word_embeddings": True,
    "vocab_size": 99,
}
MODELS = (
    FAMILIES
    | HYBRIDS
    | {
        "one K head": ("Llama", LLAMA | {"num_key_value_heads": 1, "vocab_size": VOCAB + 1}),
        "three K heads": ("Llama", THREE_HEADS),
        "biases": ("Llama", LLAMA | {"attention_bias": True, "mlp_bias": True}),
    }
)
QUICK = ("three K heads",)
PLANNED = (
    *("one K head", "biases", "Qwen3-MoE", "Gemma2", "DeepSeek-V3", "GPT-NeoX"),
    *("Granite4", "Qwen3-Next", "Kimi-Linear"),
)
"""Ranks can share their layers."""
STAGED = (*PLANNED, "GPT2", "gpt-oss", "Mamba")
SPECULATED = SamplingParams(allowed_token_ids=[5, 6, 7])
"""With three tokens to choose from, many proposals are right, and many are wrong."""
SHARDS, STAGES = pytest.param((2, 1), id="shards"), pytest.param((2, 2), id="stages")
SHARDED = pytest.mark.parametrize("ranks", [SHARDS], indirect=True)
IN_STAGES = pytest.mark.parametrize("ranks", [STAGES], indirect=True)


@pytest.fixture(scope="module", params=[SHARDS, STAGES])
def ranks(request: pytest.FixtureRequest) -> Iterator[Communicator]:
    """So many ranks in so many stages."""
    with multi_rank_engine.running(*request.param) as ranks:
        yield ranks


def settings_of(folder: Path, **settings: Any) -> dict[str, Any]:
    return SETTINGS | {"model_id": str(folder)} | settings


def on_both(
    ranks: Communicator, folder: Path, run: Callable[[Any], Any], alone: Any = None, **settings: Any
) -> tuple[Any, Any]:
    """What `run` makes of a tiny Llama on one rank, and on several."""
    if not (folder / "config.json").exists():
        tiny_models.save(folder, *FAMILIES["Llama"])
    expected = run(engine_of(folder, **(settings if alone is None else alone)))
    with Led(ranks, **settings_of(folder, **settings)) as engine:
        return run(engine), expected


@pytest.mark.parametrize("family", slow_but(QUICK, (*QUICK, *STAGED)))
def test_ids_equal_generate(ranks: Communicator, family: str, tmp_path: Path) -> None:
    if ranks.num_stages == 1 and family not in (*QUICK, *PLANNED):
        tiny_models.save(tmp_path, *MODELS[family])
        with pytest.raises(SettingError, match="no plan for") as caught:
            Led(ranks, **settings_of(tmp_path))
        assert caught.value.name == "model_id"
    else:
        check_ids(ranks, MODELS[family], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [(3, 1), (4, 2)], ids=["shards", "stages of shards"], indirect=True)
def test_ids_of_more_ranks(ranks: Communicator, tmp_path: Path) -> None:
    for family in ("one K head", "three K heads", "Qwen3-MoE"):
        check_ids(ranks, MODELS[family], tmp_path / family)


def test_rows_sample_as_on_one_rank(
    ranks: Communicator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sampled with seeds and penalties, with log-probabilities; with proposals; and greedy with both.
    Proposals are cheap, whatever rank 0 has measured.
    """
    measure = warmup.measure_steps
    monkeypatch.setattr(warmup, "measure_steps", lambda *work: (measure(*work), (1.0, 0.01))[1])
    sampled = SamplingParams(temperature=1.0, top_p=0.95, seed=7, repetition_penalty=1.1)

    def run(engine: Any) -> list[Player]:
        played = []
        for sampling in (sampled, SPECULATED, replace(SPECULATED, temperature=1.0, seed=3)):
            played.append(player(engine))
            params: dict[str, Any] = {"ignore_eos": True, "sampling": sampling, "top_n_tokens": 2}
            lines = enumerate(prompts())
            played[-1].run([played[-1].start(row, ids, NEW_TOKENS, **params) for row, ids in lines])
        return played

    found, expected = on_both(ranks, tmp_path, run, {}, speculate=3)
    for own, other in zip(found, expected, strict=True):
        assert own.ids == other.ids and own.top_logprobs.keys() == other.top_logprobs.keys()
        for place, tops in other.top_logprobs.items():
            assert own.top_logprobs[place] == pytest.approx(tops, abs=1e-4)
    assert sum(own.num_proposed for own in found) > 20


@pytest.mark.parametrize("ranks", [SHARDS, pytest.param((2, 2), marks=pytest.mark.slow)], indirect=True)
def test_rows_with_a_grammar_have_the_ids_of_one_rank(ranks: Communicator, tmp_path: Path) -> None:
    """Whole and resumed."""
    tiny_models.save_with_tokenizer(tmp_path, "Llama", tiny_models.SPEAKING)
    source = compile_unchecked(Grammar("regex", r'\{"word": "[a-z]{2,9}"\}', "f"))
    sampling = SamplingParams(grammar=source, temperature=1.2, seed=5)
    alone, rows = engine_of(tmp_path), dict(enumerate(prompts()))
    alone.matchers.waits = True
    expected = play(alone, rows, sampling=sampling)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    words = [next(iter(json.loads(tokenizer.decode(ids)))) for ids in expected.values()]
    assert words == ["word"] * len(rows)
    with Led(ranks, **settings_of(tmp_path)) as engine:
        assert play(engine, rows, sampling=sampling) == expected
        shown = {row: ids[:7] for row, ids in expected.items()}
        resumed = play(engine, rows, shown=shown, sampling=sampling)
        assert {row: shown[row] + ids for row, ids in resumed.items()} == expected


@torch.inference_mode()
def test_vectors_are_those_of_the_whole_model(ranks: Communicator, tmp_path: Path) -> None:
    model = tiny_models.save(tmp_path, *FAMILIES["Llama"])
    rows = dict(enumerate(prompts(), 1))
    with Led(ranks, **settings_of(tmp_path, runner="pooling")) as engine:
        for prefill_tokens in (1000, 7):
            for row, vector in pool_rows(engine, rows, prefill_tokens=prefill_tokens).items():
                states = model.base_model(input_ids=torch.tensor([rows[row]])).last_hidden_state
                torch.testing.assert_close(vector, states[0, -1], rtol=1e-4, atol=1e-4)


def test_beams_logits_and_prompt_logprobs_are_those_of_one_rank(ranks: Communicator, tmp_path: Path) -> None:
    """Beside each other, and beside a plain row."""

    def run(engine: Any) -> Player:
        played: Player = player(engine, 7)
        first, second, _, third = prompts()
        played.run(
            [
                played.start(1, first, 12, beams=BeamParams(3, 0.6), stop_ids=[5, 9, 30], ignore_eos=True),
                played.start(2, second, 12, beams=BeamParams(2), ignore_eos=True),
                played.start(3, third, 5, logits=LogitsParams(True, True, "float32", 1), ignore_eos=True),
                played.start(4, second, 12, prompt_logprobs=1, ignore_eos=True),
            ]
        )
        return played

    found, expected = on_both(ranks, tmp_path, run)
    assert found.ids[4] == expected.ids[4] and len(found.free) == len(expected.free)
    assert found.prompt_logprobs[4] == pytest.approx(expected.prompt_logprobs[4], abs=1e-4)
    for number in (1, 2):
        own, wanted = found.sequences[number], expected.sequences[number]
        assert [one.ids for one in own] == [one.ids for one in wanted]
        assert [one.score for one in own] == pytest.approx([one.score for one in wanted], abs=1e-4)
    values, others = (
        unpack_floats(b"".join(one.logits[3][first] for first in sorted(one.logits[3])))
        for one in (found, expected)
    )
    assert values == pytest.approx(others, abs=1e-4)


def test_a_cache_of_8_bit_floats_gives_the_ids_of_one_rank(ranks: Communicator, tmp_path: Path) -> None:
    """In stages also with weights that are rounded at load; shares would be rounded otherwise."""
    rows = dict(enumerate(prompts()))
    settings = {"kv_cache_dtype": "fp8_e4m3"} | ({"quantize": "fp8"} if ranks.num_stages > 1 else {})
    found, expected = on_both(ranks, tmp_path, lambda engine: play(engine, rows), **settings)
    assert found == expected


def test_each_rank_makes_its_part_of_dummy_weights(ranks: Communicator, tmp_path: Path) -> None:
    tiny_models.save(tmp_path, *FAMILIES["Mixtral"])
    (tmp_path / "model.safetensors").unlink()
    with Led(ranks, **settings_of(tmp_path, load_format="dummy")) as engine:
        rows = dict(enumerate(prompts()))
        found = play(engine, rows)
        assert [len(ids) for ids in found.values()] == [NEW_TOKENS] * len(rows)
        assert play(engine, rows) == found


@SHARDED
def test_a_rank_holds_half_of_the_split_parameters(ranks: Communicator, tmp_path: Path) -> None:
    """Half of the matrices of layers, experts and vocabulary; only the router's and the norms' weights are
    whole.
    """
    whole = tiny_models.save(tmp_path, *FAMILIES["Mixtral"])
    with Led(ranks, **settings_of(tmp_path)) as engine:
        held = {name: weight.numel() for name, weight in engine.engine.loaded.model.named_parameters()}
    for name, weight in whole.named_parameters():
        if name in held:  # packed ones have their own names
            halved = weight.dim() > 1 and not name.endswith("gate.weight")
            embedding = weight.numel() * 192 // VOCAB
            assert held[name] == (embedding if "embed" in name else weight.numel() // (1 + halved)), name
    assert [name for name in held if "experts" in name]


@IN_STAGES
def test_a_stage_has_its_part_of_weights_and_cache(ranks: Communicator, tmp_path: Path) -> None:
    """KV_CACHE_BYTES is for all stages, each has room for equally many tokens, and as many micro-batches as
    stages are in flight.
    """
    tiny_models.save(tmp_path, *FAMILIES["Llama-tied"])
    whole = engine_of(tmp_path)
    with Led(ranks, **settings_of(tmp_path)) as led:
        engine = led.engine
        assert led.ready.num_blocks == pytest.approx(whole.ready.num_blocks, abs=2)
        stage, loaded = engine.loaded.stage, engine.loaded
        assert (stage.begin, stage.is_first, stage.is_last) == (0, True, False)
        assert 0 < len(loaded.geometry.layers) == stage.end < len(whole.loaded.geometry.layers)
        held = {name.partition(".weight")[0] for name, _ in loaded.model.named_parameters()}
        assert "model.embed_tokens" in held
        assert not {name for name in held if "lm_head" in name or name == "model.norm"}
        seen: list[list[list[int]]] = []
        collect = engine.collect

        def noted(oldest: Any) -> float:
            steps = [oldest, *engine.in_flight]
            seen.append([[part.row.number for part in one.slices] for one in steps])
            return collect(oldest)

        engine.collect = noted  # type: ignore
        play(led, dict(enumerate(prompts())), new_tokens=24)
    both = [batches for batches in seen if len(batches) == 2]
    assert len(both) > 20 and all(len(batches) <= 2 for batches in seen)
    assert all(not {*first} & {*second} or first[0] == second[0] for first, second in both)
    assert sum(sorted(map(len, batches)) == [2, 2] for batches in both) > 10


def test_models_that_cannot_be_split_are_refused(ranks: Communicator, tmp_path: Path) -> None:
    sizes, words = (
        ({"num_hidden_layers": 1}, r"1 layers, fewer than PIPELINE_PARALLEL_SIZE \(2\)")
        if ranks.num_stages > 1
        else ({"num_attention_heads": 1, "num_key_value_heads": 1}, "1 attention heads, fewer than NUM_SHARD")
    )
    tiny_models.save(tmp_path / "small", "Llama", LLAMA | sizes)
    with pytest.raises(SettingError, match=words) as caught:
        Led(ranks, **settings_of(tmp_path / "small"))
    assert caught.value.name == "model_id" and "\n" not in str(caught.value)
    tiny_models.save(tmp_path, *FAMILIES["Llama"])
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "hqq"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    setting = "PIPELINE_PARALLEL_SIZE" if ranks.num_stages > 1 else "NUM_SHARD"
    with pytest.raises(SettingError, match=rf"{setting}: 2, but .* is quantised \(hqq\)"):
        Led(ranks, **settings_of(tmp_path))


class Passing(torch.nn.Module):
    """A layer that gives the next one its own input, too: [1, tokens, hidden]."""

    def forward(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return states + 1, states


def test_models_whose_layers_need_more_than_hidden_states_are_refused() -> None:
    """By what a layer returns, or by what a later stage computes without the embeddings."""
    layer = Passing()
    with (
        checked_layers(ModelStage(0, [(0, 1), (1, 2)], first_layer=layer)),
        pytest.raises(UnservableModel, match="hand on more"),
    ):
        layer(torch.zeros(1, 2, 3))
    assert len(layer(torch.zeros(1, 2, 3))) == 2, "the check is over"
    config = AutoConfig.for_model("llama", **LLAMA)
    spec = LayerSpec(2, 2, None, 1.0, 16, 16)
    states = torch.full((1, 8, 64), torch.nan)
    with pytest.raises(UnservableModel, match=r"take more than hidden states.*PIPELINE_PARALLEL_SIZE"):
        check_probe(SimpleNamespace(config=config), {Passing(): spec}, states, slice(2, 3))
    with pytest.raises(SettingError, match="PIPELINE_PARALLEL_SIZE: 2 does not divide the 3 ranks"):
        Communicator(RankInfo(0, 3), num_stages=2)


# --- what rows may have besides -----------------------------------------------------------------------------


@pytest.mark.slow
def test_adapters(ranks: Communicator, tmp_path: Path) -> None:
    """Each rank has its part of the matrices: the ids of PEFT's merged model."""
    family = "Llama" if ranks.num_stages > 1 else "one K head"
    model = tiny_models.save(tmp_path / "model", *MODELS[family])
    targets = [*LINEARS, "embed_tokens", "lm_head"]
    folders = {
        "all": save_adapter(model, tmp_path / "all", 1, target_modules=targets),
        "few": save_adapter(model, tmp_path / "few", 2, target_modules=["q_proj", "down_proj"], r=8),
    }
    damaged = save_adapter(model, tmp_path / "damaged", 3, target_modules=["q_proj"])
    change_config(damaged, use_dora=True)
    with Led(ranks, **settings_of(tmp_path / "model")) as engine:
        refusal = engine.obey(SetAdapter("damaged", str(damaged)))
        assert isinstance(refusal, AdapterAnswer) and "DoRA" in refusal.cause
        load_adapters(engine, folders)
        check_adapters(engine, model, folders, ["", "all", "few"])


@pytest.mark.slow
@SHARDED
def test_both_ranks_check_the_drafts_of_one(ranks: Communicator, tmp_path: Path) -> None:
    tiny_models.save(tmp_path, *FAMILIES["Llama"])
    expected = play_drafts(drafting_engine(tmp_path, None))
    speculative = {"model": str(tmp_path), "num_speculative_tokens": 4}
    with Led(ranks, **engine_settings(tmp_path, speculative, max_batch_size=4)) as engine:
        drafted = play_drafts(engine, lead=64)
    assert drafted.ids == expected.ids
    assert drafted.num_proposed > 20 and drafted.share_right > 0.9


@pytest.mark.slow
def test_pictures(ranks: Communicator, tmp_path: Path) -> None:
    """Each rank, or the first stage, has the tower; a bad picture ends its own row only."""
    seeing = Seeing(tmp_path, "Qwen2-VL")
    with Led(ranks, model_id=str(seeing.model.folder), **SEEING_SETTINGS) as engine:
        seeing.engine = engine
        assert engine.ready.pictures
        seeing.check()
        played = seeing.player()
        bad = [(start, count, "bad", b"no picture") for start, count, *_ in seeing.prompts[3].pictures]
        played.run([played.start(3, seeing.prompts[3].ids, 4, pictures=bad)])
        assert played.ended[3] == ("picture", 0)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["awq", "gptq-desc_act", "fp8-blocks", "bitsandbytes-4"])
def test_quantised_weights(ranks: Communicator, form: str, tmp_path: Path) -> None:
    """Ids are those of `generate`; in bfloat16 blocks have the bits of plain weights."""
    reference = quantized_models.save(tmp_path, *FORMATS[form])
    rows = {0: [5, 6, 7], 1: list(range(3, 40))}
    expected = answers(reference, rows)
    with Led(ranks, **settings_of(tmp_path)) as engine:
        assert play(engine, rows) == expected
    if form != "awq":
        return
    found = []
    for folder in (tmp_path, tmp_path / "plain"):
        with Led(ranks, **settings_of(folder, dtype="bfloat16")) as engine:
            found.append(play(engine, rows))
            layer = engine.engine.loaded.model.model.layers[0]
            linears = (layer.self_attn.o_proj, layer.mlp.gate_proj, layer.mlp.down_proj)
            in_blocks = [linear.blocks is not None for linear in linears if keeps_blocks()]
            assert {*in_blocks} <= {folder == tmp_path}
    assert found[0] == found[1]


@pytest.mark.slow
def test_ranks_keep_and_use_snapshots_of_states_alike(ranks: Communicator, tmp_path: Path) -> None:
    """A second turn starts where the first ended, on all ranks. A model whose code looks into other stages is
    refused.
    """
    model = tiny_models.save(tmp_path / "next", *HYBRIDS["Qwen3-Next"])
    with Led(ranks, **settings_of(tmp_path / "next", block_size=16)) as led:
        played, prompt = player(led), list(range(5, 45))
        played.kept = {*played.free}
        answer = played.run([played.start(1, prompt, 20, ignore_eos=True)])[1]
        later, cached, slots = [*prompt, *answer, 7, 8], played.tables[1][:3], led.rows.state_slots
        assert slots and cached[-1] in slots.snapshots.slots
        found = played.run([played.start_behind(cached, 2, later, 8, ignore_eos=True)])[2]
        assert found == tiny_models.generate(model, later, 8)
        assert sum(step.prefill_tokens for step in played.steps) == len(prompt) + len(later) - 48
    tiny_models.save(tmp_path / "h1", *HYBRIDS["FalconH1"])
    cause = "layers that other stages have" if ranks.num_stages > 1 else "no plan for"
    with pytest.raises(SettingError, match=cause):
        Led(ranks, **settings_of(tmp_path / "h1"))


# --- rendezvous ---------------------------------------------------------------------------------------------


def infos(world_size: int) -> list[RankInfo]:
    port = free_port()
    return [RankInfo(rank, world_size, rank, world_size, "127.0.0.1", port) for rank in range(world_size)]


def start(call: Callable[[], RankLinks]) -> "Future[RankLinks]":
    pool = ThreadPoolExecutor(1)
    future = pool.submit(call)
    pool.shutdown(wait=False)
    return future


def connected(world_size: int) -> list[RankLinks]:
    futures = [start(lambda info=info: connect_ranks(info, 20.0)) for info in infos(world_size)]  # type: ignore[misc]
    return [future.result(20) for future in futures]


def test_ranks_learn_of_the_first_loss_and_of_the_end() -> None:
    ranks = connected(3)
    losses: queue.SimpleQueue[RankLost] = queue.SimpleQueue()
    ranks[0].watch(losses.put)
    ranks[2].peers[0].shutdown(socket.SHUT_RDWR)
    lost = losses.get(timeout=20)
    assert str(lost) == "rank 2 is lost: it has ended" and ranks[0].wait_for_loss(0.0) is lost
    ranks[0].say_end()
    end = ranks[1].wait_for_loss(20.0)
    assert end and end.is_end and str(end) == "rank 0 ends the worker"


def test_those_who_are_missing_are_named_at_every_rank() -> None:
    given = infos(4)
    futures = [start(lambda info=info: connect_ranks(info, 1.0)) for info in given[:2]]  # type: ignore[misc]
    line = f"ranks 2, 3 of 4 have not connected to 127.0.0.1:{given[0].port} (connected: rank 1) within 1 s"
    assert [str(future.exception(20)) for future in futures] == [line, line]


def test_a_rank_that_finds_nobody_names_rank_0() -> None:
    info = infos(2)[1]
    with pytest.raises(
        RendezvousFailed, match=f"^rank 0 has not answered at 127.0.0.1:{info.port} within 0.5 s"
    ):
        connect_ranks(info, 0.5)


def test_a_rank_that_has_died_joins_again_and_strangers_disturb_nobody() -> None:
    given = infos(3)
    leader = start(lambda: connect_ranks(given[0], 30.0))

    def say(text: bytes) -> socket.socket:
        def connect() -> socket.socket | None:
            try:
                return socket.create_connection(("127.0.0.1", given[0].port))
            except OSError:
                return None

        connection: socket.socket = wait_until_sync(connect)
        connection.sendall(text)
        return connection

    strangers = [say(b""), say(b"GET / HTTP/1.1\r\n\r\n"), say(b"[]\n")]
    first = say(json.dumps({"rank": 1, "world_size": 3, "host": "here"}).encode() + b"\n")
    twin = say(json.dumps({"rank": 1, "world_size": 3, "host": "there"}).encode() + b"\n")
    assert json.loads(twin.recv(1000))["refused"] == "rank 1 is connected already"
    first.close()
    others = [start(lambda info=info: connect_ranks(info, 30.0)) for info in given[1:]]  # type: ignore[misc]
    assert [future.result(30).rank for future in [leader, *others]] == [0, 1, 2]
    for stranger in strangers:
        stranger.close()


@pytest.mark.parametrize(
    ("world_size", "num_stages", "line"),
    [
        (3, 1, "NUM_SHARD: 3 ranks, but 2 at rank 0"),
        (2, 2, "PIPELINE_PARALLEL_SIZE: 2, but 1 at rank 0"),
    ],
)
def test_ranks_that_split_the_model_in_another_way_are_refused(
    world_size: int, num_stages: int, line: str
) -> None:
    given = infos(2)
    start(lambda: connect_ranks(given[0], 3.0))
    with pytest.raises(SettingError, match=line):
        connect_ranks(replace(given[1], world_size=world_size), 3.0, num_stages=num_stages)


def test_a_port_that_is_taken_is_named() -> None:
    given = infos(2)
    line = f"MASTER_PORT: {given[0].port} cannot be listened at"
    with socket.create_server(("127.0.0.1", given[0].port)), pytest.raises(SettingError, match=line):
        connect_ranks(given[0], 1.0)


MEMBERS = [Member(0, "node0", "10.0.0.1"), Member(1, "node1", "10.0.0.2")]


def write(folder: Path, **files: str) -> Path:
    folder.mkdir(exist_ok=True)
    texts = {"config.json": "{}", "tokenizer.json": "{}", "model.safetensors": "weights"} | {
        name.replace("_", ".").replace("..", "_"): text for name, text in files.items()
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("files", "settings", "line"),
    [
        (
            {"config_json": "[]"},
            {},
            "MODEL_ID: config.json of tiny at rank 1 on node1 .10.0.0.2. is not that of",
        ),
        ({"model_safetensors": "weighty"}, {}, "MODEL_ID: model.safetensors of tiny at rank 1 on node1"),
        ({"more_safetensors": ""}, {}, "MODEL_ID: more.safetensors of tiny at rank 1 on node1"),
        ({"generation__config_json": "{}"}, {}, "MODEL_ID: generation_config.json of tiny at rank 1 on"),
        ({}, {"block_size": 32}, "BLOCK_SIZE: block_size of tiny at rank 1 on node1"),
    ],
)
def test_what_differs_is_named_with_its_machine(
    tmp_path: Path, files: dict[str, str], settings: dict[str, Any], line: str
) -> None:
    first = describe_model(write(tmp_path / "0"), Settings(), "float32", "cpu")
    second = describe_model(write(tmp_path / "1", **files), Settings(**settings), "float32", "cpu")
    check_same("tiny", [first, first], MEMBERS)
    with pytest.raises(SettingError, match=line):
        check_same("tiny", [first, second], MEMBERS)


# --- shards -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["DeepSeek-V2", "DeepSeek-V3"])
def test_ranks_share_the_heads_of_latent_attention(family: str) -> None:
    """Also where transformers' plan leaves attention whole; what makes latents is whole on each rank."""
    kind, sizes = FAMILIES[family]
    config = getattr(transformers, f"{kind}Config")(**sizes)
    from_config = AutoModelForCausalLM.from_config
    with torch.device("meta"):
        model = from_config(config)  # type: ignore[no-untyped-call]
    own = "model.layers.1.self_attn"
    shards = {
        name.removeprefix(f"{own}."): (of_ranks.dim, of_ranks.intervals)
        for name, of_ranks in make_tp_plan(model, 2).shards.items()
        if name.startswith(own)
    }
    queries = "q_b_proj" if sizes["q_lora_rank"] else "q_proj"
    assert shards == {
        f"{queries}.weight": (0, [(0, 48), (48, 96)]),
        "kv_b_proj.weight": (0, [(0, 56), (56, 112)]),
        "o_proj.weight": (1, [(0, 24), (24, 48)]),
    }


@pytest.mark.parametrize(
    ("layers", "first", "last", "stages", "intervals"),
    [
        ([1] * 8, 0, 0, 2, [(0, 4), (4, 8)]),
        ([1] * 8, 0, 0, 3, [(0, 3), (3, 6), (6, 8)]),
        ([1] * 8, 4, 4, 2, [(0, 4), (4, 8)]),
        ([1] * 8, 0, 4, 2, [(0, 6), (6, 8)]),
        ([1] * 8, 3, 0, 4, [(0, 1), (1, 3), (3, 5), (5, 8)]),
        ([9, 1, 1, 1], 0, 0, 2, [(0, 1), (1, 4)]),
        ([1, 1, 1], 100, 100, 3, [(0, 1), (1, 2), (2, 3)]),
        ([5], 1, 1, 1, [(0, 1)]),
    ],
)
def test_the_largest_stage_is_as_small_as_whole_layers_allow(
    layers: list[int], first: int, last: int, stages: int, intervals: list[tuple[int, int]]
) -> None:
    found = split_layers(layers, first, last, stages)
    assert largest(layers, first, last, found) == largest(layers, first, last, intervals)
    assert found[0][0] == 0 and found[-1][1] == len(layers)
    assert all(begin < end for begin, end in found)
    assert all(end == begin for (_, end), (begin, _) in pairwise(found))


def largest(layers: list[int], first: int, last: int, intervals: list[tuple[int, int]]) -> int:
    sizes = [first + layers[0], *layers[1:]]
    sizes[-1] += last
    return max(sum(sizes[begin:end]) for begin, end in intervals)
