"""The plan of shares."""

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from gpu_worker.engine.parallel.shards import make_tp_plan
from tests.support.engine.tiny_models import FAMILIES


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
