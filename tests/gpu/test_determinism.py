"""DETERMINISTIC on CUDA: cuBLAS, XQA and all other kernels of the one captured step give a row the same bits
whatever runs beside it, and in each replay.
"""

from collections.abc import Callable
from typing import Any

import torch

from gpu_worker.engine.cuda.graphs import CudaGraphs
from tests.support.engine.on_cuda import ANYWHERE, FLASH_FAMILIES
from tests.support.engine.tiny_engine import prompts
from tests.unit.gpu_worker.engine.test_deterministic import play

WIDE = FLASH_FAMILIES["Llama"][1] | {"hidden_size": 960, "intermediate_size": 4096}
"""Products of a size at which cuBLAS splits sums."""
TIMES = 5


@ANYWHERE
def test_bits_do_not_depend_on_what_runs_beside_a_row(device: str, flash: Callable[..., Any]) -> None:
    """Alone, batched, chunked in another order, resumed; and again and again."""
    _, engine = flash(("Llama", WIDE), deterministic=True)
    assert isinstance(engine.graphs, CudaGraphs) and engine.graphs.is_fixed
    rows = list(range(len(prompts())))
    alone = {row: play(engine, [row], 1000, {}, tiny=True)[row] for row in rows}
    for _ in range(TIMES if device == "cuda" else 1):
        assert play(engine, rows, 1000, {}, tiny=True) == alone, "batched"
    assert play(engine, rows[::-1], 7, {}, tiny=True) == alone, "chunked, in another order"
    resumed = play(engine, rows, 1000, {row: alone[row][0][: 5 + row] for row in rows}, tiny=True)
    assert resumed == {
        row: (ids[5 + row :], logprobs[4 * (5 + row) :]) for row, (ids, logprobs) in alone.items()
    }, "resumed"


@ANYWHERE
def test_a_product_has_the_same_bits_each_time(device: str) -> None:
    """Also of few rows and many inputs, where partial sums meet; and on another stream, which has a workspace
    of its own.
    """
    torch.manual_seed(0)
    weight = torch.randn(1024, 14336 if device == "cuda" else 512, device=device).bfloat16()
    for num_rows in (1, 8, 256):
        rows = torch.randn(num_rows, weight.shape[1], device=device).bfloat16()
        first = rows @ weight.T
        for _ in range(20):
            assert torch.equal(rows @ weight.T, first), f"{num_rows} rows"
        if device == "cuda":
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                other = rows @ weight.T
            torch.cuda.current_stream().wait_stream(side)
            assert torch.equal(other, first), f"{num_rows} rows on another stream"
