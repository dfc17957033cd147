"""Checkpoints that we quantise: served with the ids of their own numbers, read back as written, and nearer
than the nearest numbers.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from common.quantize_job import QuantizeJob
from common.settings.settings import SettingError, Settings
from gpu_worker.engine.quantization.checkpoint import StoredWeight, read_tensors
from gpu_worker.engine.quantizing.quantize import (
    BUNDLED,
    LONGEST,
    Grid,
    quantize,
    read_texts,
    round_by_gptq,
)
from tests.support.engine import tiny_models
from tests.support.engine.tiny_engine import answers, check_ids, engine_of
from tests.support.parameters.slow_but import slow_but

JOBS: dict[str, tuple[str, dict[str, Any]]] = {
    "4 bits": ("Llama", {}),
    "8 bits": ("Llama", {"bits": 8, "act_order": False, "group_size": -1}),
    "tied": ("Llama-tied", {"group_size": 32}),
    "joined layers": ("Phi3", {}),
}
LLAMA = tiny_models.FAMILIES["Llama"]


def make(source: Path, output: Path, **job: Any) -> None:
    torch.set_num_threads(1)
    made = QuantizeJob(str(source), str(output), max_tokens=2048, **job)
    quantize(made, Settings(model_id=str(source), device="cpu", threads=1))


def plain_model(source: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager")


def numbers_of(source: Path, quantized: Path) -> Any:
    """transformers' own model with the numbers that a quantised checkpoint means, in float32."""
    model = plain_model(source)
    config = json.loads((quantized / "config.json").read_text())["quantization_config"]
    stored = read_tensors(quantized, config)
    assert any(isinstance(tensor, StoredWeight) for tensor in stored.values())
    model.load_state_dict({name: tensor[...] for name, tensor in stored.items()}, strict=False)
    return model


@torch.inference_mode()
def loss(model: Any, folder: Path) -> float:
    """Of predicting each token of the calibration text."""
    job, tokenizer = QuantizeJob("", "", max_tokens=2048), Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = read_texts(job, tokenizer, int(tiny_models.SIZES["max_position_embeddings"]))
    return sum(float(model(ids, labels=ids).loss) for ids in texts) / len(texts)


@pytest.mark.parametrize("case", slow_but(["4 bits"], JOBS))
def test_a_quantised_model_is_served_with_its_own_numbers(case: str, tmp_path: Path) -> None:
    family, job = JOBS[case]
    source = tiny_models.save_with_bytes(tmp_path / "plain", *tiny_models.FAMILIES[family])
    make(source, tmp_path / "made", **job)
    reference = numbers_of(source, tmp_path / "made")
    assert loss(reference, source) == pytest.approx(loss(plain_model(source), source), rel=0.1)
    assert "lm_head" not in json.dumps(sorted(read_tensors(tmp_path / "made"))) or family != "Llama-tied"
    expected = answers(reference)
    check_ids(engine_of(tmp_path / "made"), expected)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made", "plain"]
    assert len({file.stat().st_mode for file in (tmp_path / "made").iterdir()}) == 1, "as the umask says"
    with pytest.raises(SettingError, match=r"it is quantised already \(gptq\)"):
        make(tmp_path / "made", tmp_path / "again")


def test_a_failure_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one of a disk that becomes full."""
    source = tiny_models.save_with_bytes(tmp_path / "plain", *LLAMA)
    module = "gpu_worker.engine.quantizing.quantize.save_torch_state_dict"

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, fail)
    with pytest.raises(SettingError, match=r"^OUTPUT: .*made cannot be written: No space left on device"):
        make(source, tmp_path / "made")
    monkeypatch.setattr(module, lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        make(source, tmp_path / "made")
    assert [path.name for path in tmp_path.iterdir()] == ["plain"]


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "group": ("Llama", {"group_size": 128}, r"^--group-size: 128 does not divide the 64 inputs of layer 0\."),
    "experts": ("Mixtral", {}, r"^MODEL_ID: .* cannot be quantised: its experts are one parameter"),
    "no linear layers": ("GPT2", {}, r"^MODEL_ID: .* GPT2LMHeadModel has no linear layers"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_quantised_is_refused_by_name(case: str, tmp_path: Path) -> None:
    family, job, message = REFUSED[case]
    with pytest.raises(SettingError, match=message):
        make(
            tiny_models.save_with_bytes(tmp_path / "plain", *tiny_models.FAMILIES[family]),
            tmp_path / "made",
            **job,
        )


def test_a_text_that_is_too_short_is_refused(tmp_path: Path) -> None:
    source, text = tiny_models.save_with_bytes(tmp_path / "plain", *LLAMA), tmp_path / "text"
    text.write_text("Too short.")
    job = QuantizeJob("", "", calibration=str(text))
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    with pytest.raises(SettingError, match=r"^--calibration: .* has 10 tokens, and at least 128 are needed"):
        read_texts(job, tokenizer, LONGEST)
    text.write_bytes(b"\xff\xfe" * 100)
    with pytest.raises(SettingError, match=r"^--calibration: .* cannot be read as text"):
        read_texts(job, tokenizer, LONGEST)
    assert len(BUNDLED.read_text()) > 6000


def nearest(grid: Grid, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scales = grid.scales(weight)
    return grid.quants(weight, scales.repeat_interleave(grid.size, 1)).to(torch.uint8), scales


SIZE = 32


def outliers() -> torch.Tensor:
    """Inputs that depend on each other, some much larger than others."""
    torch.manual_seed(0)
    return torch.randn(512, 64) @ torch.randn(64, 64) * torch.rand(64) ** 3


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_outputs_are_nearer_than_with_the_nearest_weights(bits: int, act_order: bool) -> None:
    rows, weight = outliers(), torch.randn(48, 64)
    weight[:, 5] = 0
    hessian, grid = rows.T @ rows / len(rows), Grid(bits, torch.float16, SIZE)
    quants, scales = rounded = round_by_gptq(weight, hessian, grid, act_order, 0.01)
    own, other = (
        float(((weight - grid.widen(*it)) @ rows.T).pow(2).sum()) for it in (rounded, nearest(grid, weight))
    )
    assert own < 0.8 * other
    assert int(quants.max()) < 2**bits and torch.equal(scales, scales.half().float())
