"""A GGUF file is served with its own weights: those of plain types stay what they are."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, GgufConfig

from common import model_files
from common.process import cpu
from gpu_worker.engine.model import gguf as convert
from tests.support.engine import tiny_models
from tests.support.engine.tiny_engine import NEW_TOKENS, engine_of, play, prompts

LAYERS, HIDDEN, MLP, HEADS, KV_HEADS, VOCAB = 2, 64, 128, 4, 2, 500
KV_SIZE = HIDDEN // HEADS * KV_HEADS
MATRICES = {
    "attn_q": (HIDDEN, HIDDEN),
    "attn_k": (KV_SIZE, HIDDEN),
    "attn_v": (KV_SIZE, HIDDEN),
    "attn_output": (HIDDEN, HIDDEN),
    "ffn_gate": (MLP, HIDDEN),
    "ffn_up": (MLP, HIDDEN),
    "ffn_down": (HIDDEN, MLP),
}
TYPES = gguf.GGMLQuantizationType


def write(path: Path, *types: TYPES) -> Path:
    """A random Llama with a tokenizer of bytes; its matrices are of these types in turn, its norms float32,
    as llama.cpp writes them.
    """
    random, writer = np.random.default_rng(0), gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b", "ab", "ba", *(f"<{number}>" for number in range(4, VOCAB))])
    writer.add_token_merges(["a b", "b a"])
    for name in ("bos", "eos", "unk"):
        getattr(writer, f"add_{name}_token_id")(1)
    shapes = {"token_embd": (VOCAB, HIDDEN), "output": (VOCAB, HIDDEN)}
    shapes |= {f"blk.{layer}.{name}": shape for layer in range(LAYERS) for name, shape in MATRICES.items()}
    for number, (name, shape) in enumerate(shapes.items()):
        kind = types[number % len(types)]
        matrix = gguf.quants.quantize(random.normal(0, 0.25, shape).astype(np.float32), kind)
        writer.add_tensor(f"{name}.weight", matrix, raw_dtype=kind)
    for name in (
        "output_norm",
        *(f"blk.{layer}.{norm}" for layer in range(LAYERS) for norm in ("attn_norm", "ffn_norm")),
    ):
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


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


@pytest.mark.parametrize("kind", [TYPES.F32, TYPES.F16])
def test_plain_weights_keep_their_type_and_give_the_ids_of_transformers(kind: TYPES, tmp_path: Path) -> None:
    """In float32: bfloat16 in between would change the ids."""
    source, folder = write(tmp_path / "tiny.gguf", kind), tmp_path / "converted"
    convert.convert(source, folder)
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert {str(file.get_tensor(name).dtype) for name in file.keys()} == {f"torch.float{kind.name[1:]}"}  # noqa: SIM118
    model = load_with_transformers(source)
    expected = {row: tiny_models.generate(model, prompt, NEW_TOKENS) for row, prompt in enumerate(prompts())}
    assert play(engine_of(folder), dict(enumerate(prompts()))) == expected


@pytest.mark.parametrize(
    "types",
    [
        [TYPES.Q8_0, TYPES.F16, TYPES.Q4_0],
        pytest.param([TYPES.Q8_0], marks=pytest.mark.slow),  # one type less
    ],
    ids=str,
)
def test_quantised_weights_are_exact_in_float32(
    types: list[TYPES], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The served file: its weights and its ids are those of transformers from the same file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = write(tmp_path / "tiny.gguf", *types)
    model = load_with_transformers(source)
    expected = {row: tiny_models.generate(model, prompt, NEW_TOKENS) for row, prompt in enumerate(prompts())}
    assert play(engine_of(source), dict(enumerate(prompts()))) == expected
    monkeypatch.setattr(cpu, "has_bfloat16", lambda: False)
    assert play(engine_of(source, dtype="auto"), dict(enumerate(prompts()))) == expected, "float32, too"
    folder = model_files.resolve(str(source), dtype="float32")
    with safe_open(folder / "model.safetensors", "pt") as file:
        written = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for name, tensor in model.state_dict().items():
        assert torch.equal(written[name], tensor), name


@pytest.mark.slow
def test_quantised_weights_are_bfloat16_for_other_types(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = write(tmp_path / "tiny.gguf", TYPES.Q8_0)
    folders = [model_files.resolve(str(source), dtype=dtype) for dtype in ("auto", "bfloat16", "float32")]
    assert folders[0] == folders[1] != folders[2]
    with safe_open(folders[0] / "model.safetensors", "pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.bfloat16}  # noqa: SIM118


def test_a_file_is_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, parsed = write(tmp_path / "tiny.gguf", TYPES.F32), list[str]()
    read = gguf.GGUFReader.__init__

    def counted(self: Any, path: str, *rest: Any) -> None:
        parsed.append(path)
        read(self, path, *rest)

    monkeypatch.setattr(gguf.GGUFReader, "__init__", counted)
    for name in ("GGUFReader", "get_tensor_name_map"):
        monkeypatch.setattr(gguf, name, getattr(gguf, name))  # what `read_once` sets is taken back
    convert.cache_gguf_parsing()
    convert.convert(source, tmp_path / "converted")
    assert parsed == [str(source)]
