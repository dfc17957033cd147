"""Memory of a GPU: what an engine takes is bounded, a step that finds no room is done in halves; and several
GPUs.
"""

import gc
import logging
from pathlib import Path

import pytest
import torch

from gpu_worker.engine.model import warmup
from gpu_worker.engine.model.warmup import measure_peak
from tests.support.engine import multi_rank_engine, tiny_models
from tests.support.engine.multi_rank_engine import Led
from tests.support.engine.on_cuda import (
    FLASH_FAMILIES,
    ON_CUDA,
    SETTINGS,
    check_near,
    engine_on,
    needs_flash,
    used_bytes,
)
from tests.support.engine.tiny_engine import play, prompts
from tests.support.engine.tiny_models import FAMILIES

pytestmark = list(ON_CUDA)
FRACTION = 0.3
CONTEXT = 8192
LONG = FLASH_FAMILIES["Llama"][1] | {"max_position_embeddings": CONTEXT, "vocab_size": 50_000}


def test_an_engine_stays_within_its_fraction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the largest step, with graphs, workspaces and all that libraries take by themselves; and little is
    left unused.
    """
    needs_flash("cuda")
    tiny_models.save(tmp_path, "Llama", LONG)
    gc.collect()
    torch.cuda.empty_cache()
    before_bytes, total_bytes = used_bytes(), torch.cuda.mem_get_info()[1]
    settings = {
        "kv_cache_bytes": None,
        "cuda_memory_fraction": FRACTION,
        "max_batch_prefill_tokens": CONTEXT,
        "max_batch_size": 256,
    }
    engine = engine_on("cuda", tmp_path, monkeypatch, dtype="bfloat16", **settings | {"block_size": 64})
    warmup.run_largest_step(engine.loaded, CONTEXT, 256)
    play(engine, dict(enumerate(prompts())))
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_reserved() <= FRACTION * total_bytes
    assert used_bytes() - before_bytes <= FRACTION * total_bytes
    assert used_bytes() - before_bytes >= 0.8 * FRACTION * total_bytes, "most of it is used"


def test_a_step_that_runs_out_of_memory_is_done_in_halves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a real allocator: it is left two thirds of what the step takes at its peak."""
    needs_flash("cuda")
    model = tiny_models.save(tmp_path, "Llama", LONG)
    settings = {"max_batch_prefill_tokens": CONTEXT, "kv_cache_bytes": 2**28, "block_size": 64}
    engine = engine_on("cuda", tmp_path, monkeypatch, dtype="bfloat16", **settings)
    prompt = torch.randint(3, 50_000, (CONTEXT - 64,)).tolist()
    parts = warmup.prompt_parts(engine.loaded, len(prompt))
    peak_bytes = measure_peak(engine.loaded.device, lambda: engine.forward(parts))
    torch.cuda.empty_cache()
    left_bytes = torch.cuda.memory_reserved() + peak_bytes * 2 // 3
    torch.cuda.set_per_process_memory_fraction(left_bytes / torch.cuda.mem_get_info()[1])
    with caplog.at_level(logging.WARNING):
        played = play(engine, {0: prompt}, prefill_tokens=CONTEXT)
    assert "tokens: halves" in caplog.text
    torch.cuda.set_per_process_memory_fraction(1.0)
    check_near(model, {0: prompt}, played, "in halves")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="torch sees fewer than two CUDA devices")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_ranks_give_the_ids_of_generate(dtype: str, tmp_path: Path) -> None:
    """By NCCL."""
    family = FAMILIES["Llama"] if dtype == "float32" else FLASH_FAMILIES["Llama"]
    model, fresh = tiny_models.save(tmp_path, *family), dict(enumerate(prompts()))
    with (
        multi_rank_engine.running(2) as communicator,
        Led(communicator, model_id=str(tmp_path), dtype=dtype, device="cuda", **SETTINGS) as engine,
    ):
        assert engine.ready.world_size == 2 and engine.ready.device == "cuda"
        for how, prefill_tokens in (("batched", 1000), ("chunked", 7)):
            played = play(engine, fresh, prefill_tokens)
            if dtype == "float32":
                assert played == {
                    row: tiny_models.generate(model, prompt, len(played[row]))
                    for row, prompt in fresh.items()
                }, how
            check_near(model, fresh, played, how)
