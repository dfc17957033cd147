"""The Triton kernels on a GPU against torch, at the sizes of real models; on CPU in Triton's interpreter, at
small ones.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from gpu_worker.engine.cuda.linear import QuantisedLinear, round_rows
from gpu_worker.engine.quantization.blocks import Blocks
from gpu_worker.engine.sampling.sampler import KeptArguments, SamplerOutput, sample_by_torch, sample_on_cuda
from tests.support.engine.on_cuda import ANYWHERE, ON_GPUS
from tests.support.engine.triton_interpreter import forget_kernels, interpret_kernels, kernels
from tests.unit.gpu_worker.engine.sampling.test_sampling_kernels import (
    SHAPES,
    compare,
    random_rows,
    same_weights,  # noqa: F401
)

QWEN = 151_936
VOCABULARIES = {"cuda": (QWEN, 50_257), "cpu": (500,)}
SEVERAL = 2**31 + 2**20
"""Numbers of a tensor whose last ones have no place in 32 bits."""


@pytest.fixture
def module(device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """The modules of kernels, by name."""
    if device == "cpu":
        interpret_kernels(monkeypatch)
    yield kernels
    if device == "cpu":
        forget_kernels()


def rows_of(output: SamplerOutput, places: list[int]) -> SamplerOutput:
    return SamplerOutput(*(column[places] for column in output))


@ANYWHERE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("same_weights")
def test_rows_are_sampled_as_by_torch(device: str, dtype: torch.dtype, module: Callable[[str], Any]) -> None:
    """With parameters of all kinds beside each other, in one launch. Entropies differ in their last bits: a
    few tokens of typical-p may do.
    """
    module("sample")
    num_typical = num_equal = 0
    for size in VOCABULARIES[device]:
        random, num_rows = np.random.default_rng(size), 24 if device == "cuda" else 4
        for shape in SHAPES:
            logits, requests = random_rows(random, shape, num_rows, size, dtype)
            if not any(requests):
                continue
            logits = logits.to(device)
            found = sample_on_cuda(logits, requests, KeptArguments())
            expected = sample_by_torch(logits, requests)
            typical = [bool(row and row.state.sampling.typical_p < 1) for row in requests]
            others = [place for place, is_typical in enumerate(typical) if not is_typical]
            compare(rows_of(found, others), rows_of(expected, others), [requests[row] for row in others])
            equal = (found.ids == expected.ids).tolist()
            num_typical += sum(typical)
            num_equal += sum(same for same, is_typical in zip(equal, typical, strict=True) if is_typical)
    assert num_equal >= 0.8 * num_typical


def blocks_of(kind: str, outputs: int, inputs: int, size: int, device: str) -> Blocks:
    factors = [torch.rand(outputs, inputs // size, device=device).half() + 0.01 for _ in range(2)]
    if kind == "floats":
        numbers = torch.randn(outputs, inputs, device=device).to(torch.float8_e4m3fn)
        return Blocks(numbers, factors[0].float(), None)
    low, high, dtype = (-128, 128, torch.int8) if kind == "int8" else (0, 16, torch.uint8)
    quants = torch.randint(low, high, (outputs, inputs), device=device).to(dtype)
    codes = torch.linspace(-1, 1, 16, device=device) if kind == "codes" else None
    return Blocks(quants, factors[0], None if codes is not None else factors[1], codes)


@ANYWHERE
@pytest.mark.parametrize("kind", ["int4", "int8", "codes", "floats"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_products_with_blocks_are_those_of_dequantised_weights(
    device: str, dtype: torch.dtype, kind: str, module: Callable[[str], Any]
) -> None:
    """Of one row to more than a tile has; outputs that fill no tile."""
    module("products")
    if device == "cpu" and dtype == torch.bfloat16:
        pytest.skip("the interpreter multiplies no bfloat16")
    torch.manual_seed(0)
    inputs, outputs = (4096, 1536 + 48) if device == "cuda" else (256, 80)
    for size in (16, 32, 128):
        blocks = blocks_of(kind, outputs, inputs, size, device)
        linear = QuantisedLinear(blocks, torch.randn(outputs, device=device, dtype=dtype))
        weight = blocks.widen(dtype).double()
        for num_rows in (1, 2, 17, 40, 300) if device == "cuda" else (1, 17):
            rows = torch.randn(num_rows, inputs, device=device, dtype=dtype)
            assert linear.bias is not None
            expected = rows.double() @ weight.T + linear.bias.double()
            error = (linear(rows).double() - expected).abs().amax() / expected.std()
            assert error < 0.05, f"{num_rows} rows, blocks of {size}"


@ON_GPUS
@pytest.mark.parametrize("biased", [False, True])
def test_products_of_8_bit_floats_are_those_of_the_rounded_numbers(device: str, biased: bool) -> None:
    """Of one row to many, by themselves and compiled."""
    torch.manual_seed(0)
    values, scales = round_rows(torch.randn(1024 + 16, 512, device=device))
    bias = torch.randn(len(values), device=device).bfloat16() if biased else None
    linear = QuantisedLinear(Blocks(values, scales, None), bias)
    compiled = torch.compile(linear, dynamic=True)
    for num_rows in (1, 2, 3, 17, 300):
        rows = torch.randn(1, num_rows, 512, device=device).bfloat16()
        rounded, factors = round_rows(rows[0])
        expected = (rounded.double() * factors) @ (values.double() * scales).T + (0 if bias is None else bias)
        with torch.inference_mode():
            for multiply in (linear, compiled):
                error = (multiply(rows)[0].double() - expected).abs().amax() / expected.std()
                assert error < 0.05, f"{num_rows} rows"


@ANYWHERE
def test_blocks_beyond_32_bits_are_written_and_copied(device: str, module: Callable[[str], Any]) -> None:
    """The last blocks of a cache that is larger than 32 bits can say, and no other."""
    torch.manual_seed(0)
    page = (2, 16, 128)
    num_blocks = SEVERAL // math.prod(page) if device == "cuda" else 9
    store = torch.zeros(2, num_blocks, *page, dtype=torch.bfloat16, device=device)
    last = num_blocks - 1
    key, value = (torch.randn(2, 16, 128, device=device).bfloat16() for _ in range(2))
    slots = torch.arange(16, device=device) + last * 16
    module("kv_write").write_keys_and_values(store[0], store[1], key, value, slots, (1.0, 1.0))
    blocks = [torch.tensor([number], device=device) for number in (last, 1)]
    module("kv_write").copy_blocks(store, *blocks)
    for tensor, written in zip(store, (key, value), strict=True):
        assert torch.equal(tensor[last], written) and torch.equal(tensor[1], written)
        assert not tensor[0].any() and not tensor[2:last].any()
