"""Checkpoints: served with the ids of transformers; QUANTIZE, LOAD_FORMAT=dummy,
sleep and the threads of a worker.

A GGUF file is served with its own weights: those of plain types stay what they are.
"""

import json
import math
import re
import shutil
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, GgufConfig

from common import model_files
from common.gguf_check import check_gguf
from common.process import machine
from common.rank import RankInfo
from common.settings.settings import SettingError, Settings
from gpu_worker.engine.model.load import threads_of
from gpu_worker.engine.model.model import SleepingModel, unique_storages
from gpu_worker.engine.model.weights import check_quantize, meta_model
from gpu_worker.engine.parallel.communicator import Communicator
from gpu_worker.engine.parallel.model_parallel import equalize_replicas, make_tp_plan
from gpu_worker.engine.quantization import gguf as convert
from tests.support.engine import tiny_models
from tests.support.engine.batch_player import player
from tests.support.engine.tiny_engine import answers, engine_of, play, prompts
from tests.support.engine.tiny_models import ENCODER_DECODERS, FAMILIES, save
from tests.support.gguf.tiny_gguf import TYPES, damage, write

FEW_TOKENS = 12
PROMPTS = ([5, 6, 7], list(range(3, 40)))


def configure(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_code_of_a_checkpoint_runs_only_when_trusted(tmp_path: Path) -> None:
    tiny_models.save(tmp_path, "Llama", tiny_models.LLAMA)
    configure(
        tmp_path,
        model_type="mine",
        auto_map={"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"},
    )
    (tmp_path / "mine.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class Config(LlamaConfig):\n    model_type = 'mine'\n"
        "class Model(LlamaForCausalLM):\n    config_class = Config\n"
    )
    with pytest.raises(SettingError, match="Python code along, which is run with TRUST_REMOTE_CODE only"):
        engine_of(tmp_path)
    engine = engine_of(tmp_path, trust_remote_code=True)
    assert type(engine.loaded.model).__name__ == "Model"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder without weights."""
    tiny_models.save(tmp_path / "whole", "Llama", tiny_models.LLAMA | {"vocab_size": 501})
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(tmp_path / "whole" / name, tmp_path)
    return tmp_path


def outputs_of(engine: Any) -> tuple[dict[int, list[int]], list[float]]:
    """New ids, and their log-probabilities."""
    played = player(engine)
    ids = played.run(
        [played.start(row, prompt, FEW_TOKENS, ignore_eos=True) for row, prompt in enumerate(PROMPTS)]
    )
    return ids, [logprob for step in played.steps for *_, logprob in step.sampled]


def test_a_config_suffices_and_all_workers_make_the_same_weights(folder: Path) -> None:
    engines = [engine_of(folder, load_format="dummy", dtype="bfloat16", block_size=16) for _ in range(2)]
    (ids, logprobs), again = (outputs_of(engine) for engine in engines)
    assert {parameter.dtype for parameter in engines[0].loaded.model.parameters()} == {torch.bfloat16}
    assert [len(ids[row]) for row in range(len(PROMPTS))] == [FEW_TOKENS] * len(PROMPTS)
    assert all(math.isfinite(logprob) for logprob in logprobs)
    assert (ids, logprobs) == again


def test_ranks_use_the_first_ones_values() -> None:
    config = transformers.Qwen3MoeConfig(**tiny_models.FAMILIES["Qwen3-MoE"][1])
    whole = meta_model(config, Settings())
    plan, sent = make_tp_plan(whole, 2), list[torch.Tensor]()
    equalize_replicas(whole, plan, SimpleNamespace(broadcast_tensor=sent.append))  # type: ignore[arg-type]
    names = {id(parameter): name for name, parameter in whole.named_parameters()}
    shared = {name for name in names.values() if name not in plan.shards}
    assert len(sent) == len(shared) and "model.layers.0.mlp.gate.weight" in shared


def test_positions_that_transformers_computes_may_be_missing(tmp_path: Path) -> None:
    """Pegasus' checkpoints have none."""
    save(tmp_path, *ENCODER_DECODERS["Pegasus"])
    file = tmp_path / "model.safetensors"
    tensors = {name: one for name, one in load_file(file).items() if "embed_positions" not in name}
    save_file(tensors, file, {"format": "pt"})
    model = engine_of(tmp_path).loaded.model
    for part in (model.get_encoder(), model.get_decoder()):
        assert torch.equal(part.embed_positions.weight, part.embed_positions.create_weight())


NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
INT8 = {"quant_method": "bitsandbytes", "load_in_8bit": True}


@pytest.mark.parametrize(
    ("quantization", "asked"),
    [
        (NF4, "bitsandbytes-nf4"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes-fp4"),
        (INT8, "bitsandbytes"),
        (NF4, None),
        (None, None),
        (None, "fp8"),
    ],
)
def test_the_checkpoints_own_method_is_served(quantization: dict[str, Any] | None, asked: str | None) -> None:
    check_quantize(quantization, Settings.read([], {"QUANTIZE": asked} if asked else {}))


@pytest.mark.parametrize(
    ("num_workers", "ranks_of_each", "threads"), [(1, 1, 16), (3, 1, 5), (3, 2, 2), (40, 1, 1)]
)
def test_workers_and_their_ranks_divide_the_cores(
    num_workers: int, ranks_of_each: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "num_cores", lambda: 16)
    communicator = Communicator(RankInfo(local_world_size=ranks_of_each))
    assert threads_of(Settings(num_workers=num_workers), communicator) == threads


def test_weights_go_and_come_back_into_the_same_tensors_and_views() -> None:
    """Tied weights are kept once. A view of a weight, as fused layers have, sees what came back."""
    first, second = nn.Linear(4, 6), nn.Linear(6, 4, bias=False)
    model = nn.Sequential(first, second)
    second.weight = nn.Parameter(first.weight.detach().T)
    model.register_buffer("table", torch.arange(5))
    view = first.weight.detach()[2:4]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    rows = view.clone()
    storages = unique_storages([*model.parameters(), *model.buffers()])
    assert len(storages) == 3
    asleep = SleepingModel(torch.device("cpu"), storages, num_blocks=7, spare_bytes=0)
    asleep.offload()
    assert [storage.nbytes() for storage in storages] == [0, 0, 0]
    asleep.reload()
    assert not asleep.copies
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert torch.equal(view, rows)


def test_an_engine_wakes_as_it_fell_asleep(tmp_path: Path) -> None:
    save(tmp_path, *FAMILIES["Gemma2"])
    engine = engine_of(tmp_path)
    rows = dict(enumerate(prompts()))
    expected, num_blocks = play(engine, rows), engine.ready.num_blocks
    engine.sleep()
    assert engine.loaded.cache.num_blocks == 0
    assert engine.wake_up(print).num_blocks == num_blocks == engine.loaded.cache.num_blocks
    later = {row + len(rows): ids for row, ids in rows.items()}
    assert [*play(engine, later).values()] == [*expected.values()]


# --- gguf convert -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("types", "expected"),
    [
        ([TYPES.F32], torch.float32),
        ([TYPES.F16], torch.float16),
        ([TYPES.BF16], torch.bfloat16),
        ([TYPES.F32, TYPES.F16], torch.float32),
        ([TYPES.F16, TYPES.BF16], torch.float32),
        ([TYPES.Q8_0], torch.bfloat16),
        ([TYPES.Q8_0, TYPES.F16], torch.bfloat16),
    ],
    ids=lambda value: str(value),
)
def test_the_written_dtype_is_that_of_the_matrices(
    types: list[TYPES], expected: torch.dtype, tmp_path: Path
) -> None:
    assert convert.dtype_of(write(tmp_path / "tiny.gguf", *types)) == expected


def load_with_transformers(source: Path) -> Any:
    """The file's own values in float32."""
    options: dict[str, Any] = {
        "gguf_file": source.name,
        "dtype": torch.float32,
        "quantization_config": GgufConfig(dequantize=True),
    }
    return AutoModelForCausalLM.from_pretrained(source.parent, **options).eval()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("kind", [TYPES.F16, pytest.param(TYPES.F32, marks=pytest.mark.slow)])
def test_plain_weights_keep_their_type_and_give_the_ids_of_transformers(kind: TYPES, tmp_path: Path) -> None:
    """In float32: bfloat16 in between would change the ids."""
    source, folder = write(tmp_path / "tiny.gguf", kind), tmp_path / "converted"
    convert.convert(source, folder)
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert {str(file.get_tensor(name).dtype) for name in file.keys()} == {f"torch.float{kind.name[1:]}"}  # noqa: SIM118
    model = load_with_transformers(source)
    expected = answers(model)
    assert play(engine_of(folder), dict(enumerate(prompts()))) == expected


@pytest.mark.slow
def test_quantised_weights_are_exact_in_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The served file: its weights and its ids are those of transformers from the same file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = write(tmp_path / "tiny.gguf", TYPES.Q8_0, TYPES.F16, TYPES.Q4_0)
    model = load_with_transformers(source)
    expected = answers(model)
    assert play(engine_of(source), dict(enumerate(prompts()))) == expected
    monkeypatch.setattr(machine, "has_bfloat16", lambda: False)
    assert play(engine_of(source, dtype="auto"), dict(enumerate(prompts()))) == expected, "float32, too"
    folder = model_files.resolve(str(source), dtype="float32")
    with safe_open(folder / "model.safetensors", "pt") as file:
        written = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for name, tensor in model.state_dict().items():
        assert torch.equal(written[name], tensor), name


NUM_CONVERTED = 4
REFUSED = r"its keys describe a model of \d+ weights|it has (no|\[.*\]) weights for|transformers does not"


def test_a_damaged_file_that_is_possible_is_converted_or_refused_in_our_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is refused is seen before memory is taken for it: the process has a limit."""
    source, folder, draw = tmp_path / "tiny.gguf", tmp_path / "converted", Random(1)
    content = write(source, TYPES.F16).read_bytes()
    monkeypatch.setattr(convert, "die_with_parent", lambda: None)
    monkeypatch.setattr(convert, "cache_gguf_parsing", lambda: None)
    monkeypatch.setattr("sys.argv", ["gguf", str(source), str(folder)])
    num_converted = 0
    while num_converted < NUM_CONVERTED:
        source.write_bytes(damage(content, draw))
        try:
            check_gguf(source)
        except SettingError:
            continue
        num_converted += 1
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        try:
            convert.main()
        except SystemExit as refused:
            assert re.match(REFUSED, str(refused)), refused
        else:
            assert (folder / "config.json").exists()


@pytest.mark.parametrize(
    ("key", "changed", "words"),
    [
        (b"blk.0.attn_q.", b"blk.0.attn_z.", "it has no weights for model.layers.0.self_attn.q_proj.weight"),
        (
            b"feed_forward_length\4\0\0\0\x80",
            b"feed_forward_length\4\0\0\0\x81",
            "weights for model.layers.0.mlp.down_proj.weight, and its keys ask for [64, 129]",
        ),
        (
            b"feed_forward_length\4\0\0\0\x80\0\0\0",
            b"feed_forward_length\4\0\0\0\x80\0\0\1",
            "its keys describe a model of ",
        ),
    ],
)
def test_a_file_whose_weights_are_not_those_of_its_keys_is_refused(
    key: bytes, changed: bytes, words: str, tmp_path: Path
) -> None:
    """transformers makes up what is missing."""
    source = write(tmp_path / "tiny.gguf", TYPES.F16)
    content = source.read_bytes()
    assert key in content
    source.write_bytes(content.replace(key, changed))
    with pytest.raises(convert.NotConvertible, match=re.escape(words)):
        convert.convert(source, tmp_path / "converted")
