"""Caches of latents (MLA): what they hold of a token, and who keeps K and V instead."""

from pathlib import Path

import pytest
from torch import nn

from gpu_worker.engine.attention.kv_cache import keep_latents, keeps_latents
from gpu_worker.engine.attention.sdpa import SdpaBackend
from gpu_worker.engine.engine import Engine
from tests.support.engine import tiny_models
from tests.support.engine.batch_player import Player
from tests.support.engine.tiny_engine import engine_of, prompts
from tests.support.engine.tiny_models import FAMILIES, LATENT

LAYERS = 3
ROOM = 2**23
RANK, ROTARY_DIM = LATENT["kv_lora_rank"], LATENT["qk_rope_head_dim"]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tmp_path_factory.mktemp("latent")
    tiny_models.save(folder, *FAMILIES["DeepSeek-V3"])
    return engine_of(folder, block_size=16)


def test_a_token_takes_one_latent_and_one_rotary_part(engine: Engine) -> None:
    """In float32, whatever number of heads; K and V of four heads would take 4 * (24 + 12) numbers."""
    token_bytes = LAYERS * (RANK + ROTARY_DIM) * 4
    block_bytes = token_bytes * engine.block_size
    assert engine.loaded.geometry.block_bytes == block_bytes
    assert engine.ready.num_blocks == ROOM // block_bytes
    held = sum(store.nbytes for store in engine.loaded.cache.stores.values())
    assert held == (engine.ready.num_blocks + 1) * block_bytes


def test_rows_that_start_with_blocks_of_others_have_the_same_ids(engine: Engine) -> None:
    prompt = prompts()[-1]
    played = Player(engine, list(range(1, engine.ready.num_blocks + 1)), 1000, until=engine.rows.step)
    played.kept = set(played.free)
    first = played.start(0, prompt, 20, ignore_eos=True)
    known = played.rows[0].blocks[: (len(prompt) - 1) // engine.block_size]
    expected = played.run([first])[0]
    twin = played.start_behind(known, 1, prompt, 20, ignore_eos=True)
    assert twin.num_cached == len(known) * engine.block_size > 0
    assert played.run([twin])[1] == expected


def test_layers_share_a_class_and_a_view(engine: Engine) -> None:
    """Compilers, and what a step prepares, then serve all of them at once."""
    modules, geometry = engine.loaded.attentions, engine.loaded.geometry
    assert len(modules) == LAYERS and len({type(module) for module in modules}) == 1
    assert all(keeps_latents(module) and "forward" not in vars(module) for module in modules)
    [spec] = {layer.spec for layer in geometry.layers}
    assert spec.latent and (spec.kv_heads, spec.group) == (1, 4)
    assert isinstance(engine.loaded.backend, SdpaBackend)


class Quantized(nn.Linear):
    """Stands for a layer of one of transformers' quantizers."""


def test_weights_of_other_kinds_are_left_alone(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    model = tiny_models.save(tmp_path, *FAMILIES["DeepSeek-V3"])
    attention = model.model.layers[1].self_attn
    attention.kv_b_proj = Quantized(RANK, 112, bias=False)
    keep_latents(model)
    assert [keeps_latents(layer.self_attn) for layer in model.model.layers] == [True, False, True]
    assert "model.layers.1.self_attn keeps K and V, not latents" in caplog.text
