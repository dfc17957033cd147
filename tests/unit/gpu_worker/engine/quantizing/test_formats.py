"""What is written is what the readers of checkpoints read."""

import pytest
import torch

from common.quantize_job import QuantizeJob
from gpu_worker.engine.quantization.integers import read_awq, read_gptq
from gpu_worker.engine.quantization.weight import widen
from gpu_worker.engine.quantizing.formats import awq_fields, config_of, gptq_fields
from gpu_worker.engine.quantizing.grid import Grid


@pytest.mark.parametrize(("method", "bits"), [("gptq", 4), ("gptq", 8), ("awq", 4)])
def test_integers_are_read_back(method: str, bits: int) -> None:
    torch.manual_seed(0)
    job = QuantizeJob("", "", method, bits)
    rounded = Grid(bits, method == "gptq", torch.bfloat16).round_groups(torch.randn(64, 128), 32)
    config = config_of(job, 32, "lm_head")
    if method == "awq":
        weight = read_awq(awq_fields(rounded, torch.bfloat16), config)
    else:
        weight = read_gptq(gptq_fields(rounded, bits, torch.bfloat16), config)
    assert torch.equal(widen(weight), rounded.widen())
