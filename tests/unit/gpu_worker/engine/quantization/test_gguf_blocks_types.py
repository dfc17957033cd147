"""Each type is unpacked to what gguf's own code dequantises it to."""

import gguf
import numpy as np
import pytest
import torch

from gpu_worker.engine.quantization.blocks import Blocks
from gpu_worker.engine.quantization.gguf import UNPACK, unpack

ROWS, INPUTS = 6, 768
FLOAT16_AT = {
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
}
"""Bytes of a block where its float16 numbers are; all other bytes may be anything."""


@pytest.mark.parametrize("name", UNPACK)
def test_a_type_is_unpacked_to_the_weights_that_it_means(name: str) -> None:
    kind, random = gguf.GGMLQuantizationType[name], np.random.default_rng(0)
    weights, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    data = random.integers(0, 256, (ROWS, INPUTS // weights * num_bytes), dtype=np.uint8)
    blocks = data.reshape(-1, num_bytes)
    for at in FLOAT16_AT[name]:
        blocks[:, at : at + 2] = random.normal(0, 1, (len(blocks), 1)).astype("<f2").view(np.uint8)
    expected = torch.from_numpy(gguf.quants.dequantize(data, kind))
    assert torch.equal(Blocks(*unpack(name, data)).widen(), expected.bfloat16())
