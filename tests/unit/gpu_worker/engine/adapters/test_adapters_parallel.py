"""Adapters on several ranks, each with its part of the matrices: the ids of PEFT's merged model."""

from pathlib import Path
from typing import Any

import pytest

from gpu_worker.protocol import AdapterRefused, LoadAdapter
from tests.support.adapters.playing import check_adapters, load_adapters
from tests.support.adapters.tiny_adapters import LINEARS, change_config, save_adapter
from tests.support.engine import tiny_models
from tests.support.engine.multi_rank_engine import SETTINGS, Led, running

pytestmark = pytest.mark.slow

MODELS = {
    "Llama": tiny_models.FAMILIES["Llama"],
    "one K head": ("Llama", tiny_models.LLAMA | {"num_key_value_heads": 1, "vocab_size": 501}),
}
VOCABULARY = [*LINEARS, "embed_tokens", "lm_head"]


@pytest.mark.parametrize(("num_stages", "name"), [(1, "one K head"), (2, "Llama")])
def test_ids_of_two_ranks_equal_those_of_merged_models(num_stages: int, name: str, tmp_path: Path) -> None:
    model = tiny_models.save(tmp_path / "model", *MODELS[name])
    folders = {
        "all": save_adapter(model, tmp_path / "all", 1, target_modules=VOCABULARY),
        "few": save_adapter(model, tmp_path / "few", 2, target_modules=["q_proj", "down_proj"], r=8),
    }
    damaged = save_adapter(model, tmp_path / "damaged", 3, target_modules=["q_proj"])
    change_config(damaged, r=5)
    settings: dict[str, Any] = SETTINGS | {"model_id": str(tmp_path / "model"), "threads": 1}
    with running(2, num_stages) as ranks, Led(ranks, **settings) as engine:
        refusal = engine.obey(LoadAdapter("damaged", str(damaged)))
        assert isinstance(refusal, AdapterRefused) and "rank 5" in refusal.cause
        load_adapters(engine, folders)
        check_adapters(engine, model, folders, ["", "all", "few"])
