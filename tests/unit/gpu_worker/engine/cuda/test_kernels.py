"""The Triton kernels where there is no GPU: in Triton's interpreter against torch, and compiled for one."""

import math
from collections.abc import Callable, Iterator
from types import ModuleType

import numpy as np
import pytest
import torch

from gpu_worker.engine.adapters import DeviceTokens, add_low_rank
from gpu_worker.engine.attention.backend import FLOATS8, write_kv
from gpu_worker.engine.batch.inputs import AdaptedTokens
from gpu_worker.engine.cuda.linear import INPUTS_AT_ONCE, QuantisedLinear
from gpu_worker.engine.quantization.blocks import Blocks
from gpu_worker.engine.sampling.sampler import ALIGNMENT, greedy
from tests.support.engine.triton_interpreter import forget_kernels, interpret_kernels, kernels

HOPPER, WARP = 90, 32
SHARED_BYTES = 99 * 1024
"""What a program may have on every card since Ampere."""
BLOCKS, BLOCK_SIZE = 7, 16
Interpreted = Callable[[str], ModuleType]


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Interpreted]:
    """Modules with kernels, of which Triton makes functions that run on tensors of the CPU."""
    interpret_kernels(monkeypatch)
    yield kernels
    forget_kernels()


def caches(kv_heads: int, dim: int) -> torch.Tensor:
    return torch.randn(BLOCKS, kv_heads, BLOCK_SIZE, dim, dtype=torch.bfloat16)


def as_model_code_leaves(tokens: int, kv_heads: int, dim: int) -> list[torch.Tensor]:
    """Keys [kv_heads, tokens, dim] as a rotary embedding leaves them; values as part of a merged product;
    ones whose numbers lie apart.
    """
    rotated = torch.randn(kv_heads, tokens, dim)
    merged = (
        torch.randn(tokens, kv_heads * 3 * dim)[:, kv_heads * dim : 2 * kv_heads * dim]  # type: ignore[no-untyped-call]
        .unflatten(1, (kv_heads, dim))
        .transpose(0, 1)
    )
    return [
        rotated.bfloat16(),
        merged.bfloat16(),
        torch.randn(kv_heads, dim, tokens).bfloat16().transpose(1, 2),
    ]


@pytest.mark.parametrize(("kv_heads", "key_dim", "value_dim"), [(1, 64, 64), (3, 128, 128), (2, 24, 16)])
def test_keys_and_values_are_written_to_their_slots(
    kv_heads: int, key_dim: int, value_dim: int, interpreted: Interpreted
) -> None:
    torch.manual_seed(0)
    slots = torch.tensor([100, 3, 16, 15, 111])
    for key, value in zip(
        *(as_model_code_leaves(len(slots), kv_heads, dim) for dim in (key_dim, value_dim)), strict=True
    ):
        expected = caches(kv_heads, key_dim), caches(kv_heads, value_dim)
        found = [cache.clone() for cache in expected]
        write_kv(*expected, key, value, slots)
        interpreted("kv_write").write_keys_and_values(*found, key, value, slots.int(), (1.0, 1.0))
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("dtype", FLOATS8.values(), ids=str)
def test_keys_and_values_become_8_bit_floats(dtype: torch.dtype, interpreted: Interpreted) -> None:
    """Of all sizes: too large ones, such as lie between two, the smallest; NaN."""
    torch.manual_seed(0)
    slots, scales = torch.tensor([100, 3, 16, 15, 111]), (0.37, 1.0)
    numbers = torch.randn(2, len(slots), 64) * torch.logspace(-7, 6, 64)
    halves = torch.arange(5 * 64).to(torch.uint8).view(dtype).float().view(5, 64) * 1.0625
    key, value = numbers.bfloat16(), torch.stack((halves, numbers[0])).bfloat16()
    expected = [torch.zeros(BLOCKS, 2, BLOCK_SIZE, 64, dtype=dtype) for _ in range(2)]
    found = [torch.zeros_like(cache) for cache in expected]
    write_kv(expected[0], expected[1], key, value, slots, scales)
    interpreted("kv_write").write_keys_and_values(*found, key, value, slots.int(), scales)
    for cache, other in zip(found, expected, strict=True):
        assert other.float().any()
        torch.testing.assert_close(cache.float(), other.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("size", [64, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_top_k_equals_that_of_torch(
    size: int, dtype: torch.dtype, interpreted: Interpreted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some are equal, some impossible; a row's bits are its own."""
    torch.manual_seed(0)
    logits = torch.randn(4, size).to(dtype)
    logits[1, 7::64] = logits[1, 12] = 9.0
    logits[2, 1:-1] = -math.inf
    module = interpreted("sample")
    monkeypatch.setattr(module, "GREEDY_WIDTH", 64)
    ids, logprobs = module.greedy_rows(logits)
    wanted_ids, expected = greedy(logits)
    assert ids.tolist() == wanted_ids.tolist() and ids[1] == 7
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-6)
    alone = [module.greedy_rows(row[None])[1] for row in logits]
    assert torch.equal(torch.cat(alone), logprobs)


@pytest.mark.parametrize("kind", [torch.uint8, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize(("size", "rows"), [(16, 1), (32, 5), (128, 19)])
def test_products_with_blocks_equal_those_with_dequantised_weights(
    kind: torch.dtype, size: int, rows: int, interpreted: Interpreted
) -> None:
    """In float32, to the order of sums; more rows and outputs than a tile has; a part of the outputs; quants
    of 4 bits also as codes.
    """
    torch.manual_seed(0)
    outputs, inputs = 70, 256
    quants = torch.randint(0, 16, (outputs, inputs)).to(kind)
    scales, offsets = torch.rand(outputs, inputs // size).half(), torch.randn(outputs, inputs // size)
    numbers, bias = torch.randn(rows, inputs), torch.randn(outputs)
    multiply_tiles = interpreted("products").multiply_tiles
    for codes, own in ((None, slice(None)), (torch.randn(16) if kind == torch.uint8 else None, slice(6, 70))):
        blocks = Blocks(quants, scales, offsets if codes is None else None, codes)
        packed = QuantisedLinear(blocks, bias)
        tensors = (packed.weight, packed.scales, packed.offsets)
        parts = [None if tensor is None else tensor[own] for tensor in tensors]
        found = multiply_tiles(numbers, *parts, codes, bias[own], INPUTS_AT_ONCE)
        expected = torch.nn.functional.linear(numbers, blocks.widen(torch.float32)[own], bias[own])
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
        halves = multiply_tiles(numbers.half(), *parts, codes, None, INPUTS_AT_ONCE)
        rounded = torch.nn.functional.linear(numbers.half().float(), blocks.widen(torch.float16)[own].float())
        torch.testing.assert_close(halves.float(), rounded, rtol=1e-3, atol=1e-2)


def types_of(numbers: str, slots: str) -> dict[str, str]:
    return dict.fromkeys(("keys", "values", "key", "value"), numbers) | {"slots": slots}


def product_types(quants: str) -> dict[str, str]:
    types = {"rows": "*bf16", "bias": "*bf16", "results": "*bf16", "codes": "*fp32", "quants": quants}
    return types | dict.fromkeys(("scales", "offsets"), "*fp16")


def adapter_types(own: str) -> dict[str, str]:
    types = dict.fromkeys(("rows", "down", "up", "output"), "*bf16") | {"shrunk": "*fp32"}
    return types | dict.fromkeys(("ranks", "order", "starts"), "*i32") | {own: "i32"}


SCALES = {"key_scale": "fp32", "value_scale": "fp32"}
COMPILED: list[tuple[str, str, dict[str, int | None], dict[str, str]]] = [
    (
        "kv_write",
        "write_line",
        {"key_dim": 128, "value_dim": 128, "width": 128, "mantissa": 0, "largest": 0},
        types_of("*bf16", "*i64") | SCALES,
    ),
    (
        "kv_write",
        "write_line",
        {"key_dim": 128, "value_dim": 128, "width": 128, "mantissa": 3, "largest": 448},
        types_of("*bf16", "*i64") | SCALES | {"keys": "*u8", "values": "*u8"},
    ),
    (
        "kv_write",
        "write_line",
        {"key_dim": 24, "value_dim": 16, "width": 32, "heads": 1, "mantissa": 2, "largest": 57344},
        types_of("*fp32", "*i32") | SCALES | {"keys": "*u8", "values": "*u8"},
    ),
    (
        "kv_write",
        "fill_block_part",
        {"width": 2048},
        {"store": "*bf16", "blocks": "*i64", "value": "fp32"},
    ),
    (
        "sample",
        "greedy_row",
        {"size": 49_152, "width": 8192},
        {"logits": "*bf16", "ids": "*i64", "logprobs": "*fp32"},
    ),
    (
        "products",
        "multiply_tile",
        {
            "size": 128,
            "halves": 2,
            "tile_rows": 16,
            "tile_outputs": 32,
            "part": 32,
            "codes": None,
            "bias": None,
        },
        product_types("*u8"),
    ),
    (
        "products",
        "multiply_tile",
        {"size": 64, "halves": 2, "tile_rows": 64, "tile_outputs": 64, "part": 32, "offsets": None},
        product_types("*u8"),
    ),
    (
        "products",
        "multiply_tile",
        {"size": 128, "halves": 1, "tile_rows": 16, "tile_outputs": 32, "part": 32}
        | {"codes": None, "offsets": None, "bias": None},
        product_types("*fp8e4nv"),
    ),
    (
        "sample",
        "sample_row",
        {"size": 151_936, "width": 4096, "part": 1024},
        {"logits": "*bf16"}
        | dict.fromkeys(("seeds", "output_ids", "totals"), "*i64")
        | dict.fromkeys(("typical_ps", "top_ps"), "*fp64")
        | dict.fromkeys(("temperatures", "repetitions", "lowests", "values"), "*fp32")
        | dict.fromkeys(("all_scores", "output_logprobs"), "*fp32")
        | dict.fromkeys(
            ("choices", "top_ks", "raw_logprobs", "num_tops", "places", "indices", "parts"), "*i32"
        )
        | dict.fromkeys(("mask_spans", "ids", "masks", "lists", "kept_counts"), "*i32"),
    ),
    (
        "adapters",
        "shrink_tile",
        {"max_rank": 64, "tile_rows": 16, "tile_ranks": 64, "tile_inputs": 128},
        adapter_types("row_stride"),
    ),
    (
        "adapters",
        "expand_tile",
        {"max_rank": 24, "tile_rows": 16, "tile_ranks": 32, "tile_outputs": 64},
        adapter_types("output_stride"),
    ),
]
"""Module, kernel, what is a constant in it, and the types of what is no int32. Triton takes a 1 for a
constant.
"""


@pytest.mark.parametrize(("module", "name", "constants", "types"), COMPILED)
def test_kernels_compile_for_gpus(
    module: str, name: str, constants: dict[str, int | None], types: dict[str, str]
) -> None:
    """For a GPU that need not be there, as they are launched: what is annotated or computed in a way that
    Triton does not know fails here.
    """
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, options = getattr(kernels(module), name), getattr(kernels(module), "OPTIONS", {})
    signature = {argument: types.get(argument, "i32") for argument in kernel.arg_names} | dict.fromkeys(
        constants, "constexpr"
    )
    aligned = {
        (place,): [["tt.divisibility", ALIGNMENT]]
        for place, argument in enumerate(kernel.arg_names)
        if signature[argument].startswith("*")
    }
    source, target = ASTSource(kernel, signature, constants, aligned), GPUTarget("cuda", HOPPER, WARP)
    compiled = triton.compile(source, target=target, options=options)
    assert compiled.asm["cubin"] and compiled.metadata.shared <= SHARED_BYTES
    assert "fma.rn.f32" not in compiled.asm["ptx"]


SLOTS, MAX_RANK = 4, 24
RANKS = torch.tensor([4, 24, 0, 17], dtype=torch.int32)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    interpret_kernels(monkeypatch)
    yield kernels("adapters")
    forget_kernels()


@pytest.mark.parametrize("num_tokens", [1, 7, 45])
def test_what_adapters_add_equals_what_torch_computes(num_tokens: int, module: ModuleType) -> None:
    """Rows and outputs that lie apart, as parts of a merged product do; slots without rows, and of rank 0."""
    torch.manual_seed(num_tokens)
    slots = np.random.default_rng(0).integers(-1, SLOTS, num_tokens).astype(np.int32)
    tokens = DeviceTokens(64, SLOTS, torch.device("cpu"))
    tokens.set(AdaptedTokens.of(slots))
    inputs, outputs = 150, 70
    rows = torch.randn(num_tokens, inputs)
    down, up = torch.randn(SLOTS, MAX_RANK, inputs), torch.randn(SLOTS, outputs, MAX_RANK)
    merged = torch.randn(num_tokens, 2 * outputs)
    found = merged.clone()
    shrunk = module.shrink(rows, down, RANKS, tokens.order, tokens.starts)
    module.expand(found[:, outputs:], shrunk, up, RANKS, tokens.order, tokens.starts)
    step = RANKS, tokens.slots, tokens.order, tokens.starts
    expected = add_low_rank(merged[:, outputs:], rows, down, up, *step)
    torch.testing.assert_close(found[:, outputs:], expected, rtol=1e-5, atol=1e-3)
    plain = [place for place, slot in enumerate(slots) if slot in (-1, 2)]
    assert torch.equal(found[plain], merged[plain]) and torch.equal(found[:, :outputs], merged[:, :outputs])
