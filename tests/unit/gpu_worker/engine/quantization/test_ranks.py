"""Quantised weights are split between ranks, by shards and by stages, as blocks where they are served so."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpu_worker.engine.parallel.communicator import Communicator
from tests.support.engine import multi_rank_engine, quantized_models, tiny_models
from tests.support.engine.multi_rank_engine import Led
from tests.support.engine.quantized_models import FORMATS, keeps_blocks
from tests.support.engine.tiny_engine import NEW_TOKENS, play

ROWS = {0: [5, 6, 7], 1: list(range(3, 40))}
QUICK = ("gptq-desc_act",)
SETTINGS: dict[str, Any] = {
    "kv_cache_bytes": 2**23,
    "max_batch_prefill_tokens": 64,
    "block_size": 8,
    "threads": 1,
}


@pytest.fixture(scope="module", params=[1, 2], ids=["shards", "stages"])
def two(request: pytest.FixtureRequest) -> Iterator[Communicator]:
    """Two ranks that share each layer, and two that have some of the layers each."""
    with multi_rank_engine.running(2, num_stages=request.param) as ranks:
        yield ranks


@pytest.mark.slow
@pytest.mark.parametrize(
    "form", [form if form in QUICK else pytest.param(form, marks=pytest.mark.slow) for form in FORMATS]
)
def test_ids_of_quantised_weights_on_two_ranks_equal_generate(
    two: Communicator, form: str, tmp_path: Path
) -> None:
    reference = quantized_models.save(tmp_path, *FORMATS[form])
    expected = {row: tiny_models.generate(reference, prompt, NEW_TOKENS) for row, prompt in ROWS.items()}
    with Led(two, model_id=str(tmp_path), dtype="float32", **SETTINGS) as engine:
        assert play(engine, ROWS) == expected  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["awq", pytest.param("w4a16", marks=pytest.mark.slow)])
def test_blocks_have_the_bits_of_plain_weights_on_two_ranks(
    two: Communicator, form: str, tmp_path: Path
) -> None:
    quantized_models.save(tmp_path, *FORMATS[form])
    found = []
    for folder in (tmp_path, tmp_path / "plain"):
        with Led(two, model_id=str(folder), dtype="bfloat16", **SETTINGS) as engine:
            found.append(play(engine, ROWS))  # type: ignore[arg-type]
            layer = engine.engine.loaded.model.model.layers[0]
            linears = (layer.self_attn.o_proj, layer.mlp.gate_proj, layer.mlp.down_proj)
            in_blocks = [linear.blocks is not None for linear in linears if keeps_blocks()]
            assert {*in_blocks} <= {folder == tmp_path}
    assert found[0] == found[1]
