"""Products of packed weights against torch's, and the memory of weights: in large pages, and shared by
engines where their bytes are equal.
"""

import ctypes
import errno
import fcntl
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from common.process.launch import WEIGHTS_VARIABLE
from gpu_worker.engine.cpu import native, packed_linear, weight_store
from gpu_worker.engine.cpu.packed_linear import LargePages, NativeLinear
from gpu_worker.engine.cpu.weight_store import HUGE_BYTES, WeightStore, aligned_address, private_memory
from gpu_worker.engine.quantization.blocks import Blocks

SHAPES = [(96, 144, False), (50, 7, True), (64, 100, True), (30, 16, False), (34, 49, True)]
"""Inputs and outputs, more or fewer than fit the units in which processors multiply; whether with a bias."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(("inputs", "outputs", "bias"), SHAPES)
def test_products_do_not_depend_on_the_batch(
    dtype: torch.dtype, whole: bool, inputs: int, outputs: int, bias: bool, library: Any
) -> None:
    """A row's result is the same bits alone and among others; whole, it is as exact as float32."""
    if not library.tf_multiplies(native.TYPE_CODES[dtype]):
        pytest.skip("torch's products are used on this processor")
    torch.manual_seed(0)
    linear = nn.Linear(inputs, outputs, bias=bias).to(dtype)
    packed = NativeLinear(linear, library, whole, LargePages())
    for num_rows in range(1, 41):
        states = torch.randn(1, num_rows, inputs).to(dtype)
        expected = states.double() @ linear.weight.double().T + (linear.bias.double() if bias else 0)
        result = packed(states)
        torch.testing.assert_close(
            result.double(), expected, rtol=2 * torch.finfo(result.dtype).eps, atol=1e-5
        )
        assert result.dtype == (torch.float32 if whole else dtype)
        assert all(
            torch.equal(packed(states[:, row:]), result[:, row:])
            for row in {0, 1, num_rows // 2, num_rows - 1}
        )


@pytest.mark.parametrize(
    "rows",
    [torch.ones(2, 10), torch.ones(2, 6), torch.ones(2, 8, dtype=torch.bfloat16)],
    ids=["wide", "narrow", "type"],
)
def test_rows_that_do_not_fit_are_refused(rows: torch.Tensor, library: Any) -> None:
    """As torch does; nothing beyond them is read."""
    linear = nn.Linear(8, 8)
    for layer in (linear, NativeLinear(linear, library, False, LargePages())):
        with pytest.raises(RuntimeError):
            layer(rows)


def test_wrong_products_are_not_used(
    library: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right = NativeLinear.product
    monkeypatch.setattr(
        NativeLinear,
        "product",
        lambda self, rows, biased: right(self, rows, biased) + 0.5 * (rows.shape[0] > 1),
    )
    monkeypatch.setattr(packed_linear, "multiplies_correctly", packed_linear.multiplies_correctly.__wrapped__)
    assert type(packed_linear.pack_linear(nn.Linear(8, 8), False, LargePages())) is not NativeLinear
    assert ("are wrong on this processor" in caplog.text) == bool(
        library.tf_multiplies(native.TYPE_CODES[torch.float32])
    )


def random_blocks(bits: int, size: int, offsets: bool, dtype: torch.dtype, outputs: int = 100) -> Blocks:
    quants = torch.randint(0, 16, (outputs, 320)) if bits == 4 else torch.randint(-128, 128, (outputs, 320))
    scales, more = (torch.randn(outputs, 320 // size).half().to(dtype) for _ in range(2))
    return Blocks(quants.to(torch.uint8 if bits == 4 else torch.int8), scales, more if offsets else None)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("size", [16, 32])
@pytest.mark.parametrize("more", ["offsets", "codes", ""])
@pytest.mark.parametrize("scales", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_weights_in_blocks_give_the_bits_of_plain_weights(
    bits: int, size: int, more: str, scales: torch.dtype, dtype: torch.dtype, library: Any
) -> None:
    """Alone, and beside the plain weights; for few rows and many."""
    if bits == 8 and more == "codes":
        pytest.skip("only quants of 4 bits stand for codes")
    if not library.tf_multiplies(native.TYPE_CODES[dtype]):
        pytest.skip("torch's products are used on this processor")
    torch.manual_seed(0)
    blocks = random_blocks(bits, size, more == "offsets", scales)
    blocks.codes = torch.randn(16) if more == "codes" else None
    linear = nn.Linear(320, 100).to(dtype)
    linear.weight = nn.Parameter(blocks.widen(dtype), requires_grad=False)
    plain = NativeLinear(linear, library, True, LargePages())
    alone, beside = (
        NativeLinear(linear, library, True, LargePages(), blocks, kept) for kept in (False, True)
    )
    assert alone.packed is None and torch.equal(alone.weight, linear.weight)
    for num_rows in (1, 2, 3, 4, 5, 8, 33, 70):
        rows = torch.randn(num_rows, 320).to(dtype)
        assert torch.equal(alone(rows), plain(rows)) and torch.equal(beside(rows), plain(rows))


def test_blocks_larger_than_kernels_take_are_not_used(library: Any) -> None:
    """They would be expanded beyond the kernels' memory."""
    linear, blocks = nn.Linear(320, 100), random_blocks(4, 320, False, torch.float32)
    packed = packed_linear.pack_linear(linear, False, LargePages(), blocks, plain=False)
    assert getattr(packed, "blocks", None) is None


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("size", [16, 32, 64])
@pytest.mark.parametrize("more", ["offsets", ""])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rounded_rows_give_products_near_the_exact_ones(
    bits: int, size: int, more: str, dtype: torch.dtype, library: Any
) -> None:
    """Each input is off by at most half a step of its grain; a row's result does not depend on the batch."""
    if not library.tf_rounds(native.TYPE_CODES[dtype]):
        pytest.skip("rows are not rounded on this processor")
    torch.manual_seed(0)
    blocks = random_blocks(bits, size, more == "offsets", torch.float16)
    linear = nn.Linear(320, 100).to(dtype)
    linear.weight = nn.Parameter(blocks.widen(dtype), requires_grad=False)
    packed = NativeLinear(linear, library, True, LargePages(), blocks, plain=False)
    rows = torch.randn(33, 320).to(dtype)
    rows[1, :32] = 0
    exact = packed(rows)
    packed.struct.blocks.rounds = True
    steps = (rows.float().view(33, -1, 32).abs().amax(2) / 127).repeat_interleave(32, 1)
    off = (packed(rows) - exact).abs()
    assert (off <= 0.51 * steps @ blocks.widen(torch.float32).abs().T).all() and off.max() > 0
    assert off.norm() / exact.norm() < 0.02
    for num_rows in (1, 2, 3, 4, 7, 8):
        assert torch.equal(packed(rows[:num_rows]), packed(rows)[:num_rows])
    assert torch.equal(packed.weight, linear.weight)


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory without a name is Linux's")

NUM_BYTES = 2 * HUGE_BYTES


class PrivateMemory:
    """Two large pages of a process's own."""

    def __init__(self, content: bytes) -> None:
        self.memory = private_memory(NUM_BYTES)
        self.address = aligned_address(self.memory)
        ctypes.memmove(self.address, content * (NUM_BYTES // len(content)), NUM_BYTES)

    @property
    def content(self) -> bytes:
        return ctypes.string_at(self.address, NUM_BYTES)

    @property
    def offset(self) -> int | None:
        return offset_of(self.address)


def offset_of(address: int) -> int | None:
    """Where in the store this memory is mapped from; None if it is private."""
    with open("/proc/self/maps") as maps:
        for words in map(str.split, maps):
            first, end = (int(word, 16) for word in words[0].split("-"))
            if first <= address < end:
                return int(words[2], 16) + address - first if "weights" in words[-2] else None
    raise AssertionError("not mapped")


@pytest.fixture
def store() -> Iterator[WeightStore]:
    handle = os.memfd_create("weights")
    store = WeightStore(handle)
    try:
        store.begin()
    except OSError:
        pytest.skip("shared memory has no large pages here")
    yield store
    os.close(handle)


def test_the_store_stays_locked_while_a_segment_is_compared(store: WeightStore) -> None:
    """Without the lock two engines would write at the same place, and compute with each other's weights."""
    memory = PrivateMemory(b"ab")
    store.share(memory.address, NUM_BYTES)
    with store.locked():
        assert store.find(memory.address, NUM_BYTES) is not None
        if (child := os.fork()) == 0:
            try:
                fcntl.lockf(store.handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os._exit(0)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0


def test_an_engine_that_is_killed_while_it_adds_weights_leaves_none(
    store: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (child := os.fork()) == 0:
        write, count = weight_store.write, [0]

        def write_once(handle: int, data: bytes | memoryview, offset: int) -> None:
            count[0] += 1
            if count[0] == 2:  # the bytes are there, and not their size
                os.kill(os.getpid(), signal.SIGKILL)
            write(handle, data, offset)

        monkeypatch.setattr(weight_store, "write", write_once)
        memory = PrivateMemory(b"dead")
        store.share(memory.address, NUM_BYTES)
        os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    memory = PrivateMemory(b"live")
    store.share(memory.address, NUM_BYTES)  # the system has unlocked the store
    assert memory.offset == HUGE_BYTES and memory.content == b"live" * (NUM_BYTES // 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_engines_share_all_parameters_also_while_no_large_page_is_left(
    store: WeightStore, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setenv(WEIGHTS_VARIABLE, str(store.handle))
    monkeypatch.setattr(weight_store, "C", FullMemory)
    weight = torch.randn(2**10, 2**10).to(dtype)
    engines = [nn.Embedding(2**10, 2**10, _weight=weight.clone()) for _ in range(2)]
    for one in engines:
        packed_linear.share_parameters(one)
    assert all(torch.equal(one.weight, weight) for one in engines)
    assert {offset_of(one.weight.data_ptr()) for one in engines} == {HUGE_BYTES}


class FullMemory:
    """The system, which has no large page left."""

    mmap, memcmp = weight_store.C.mmap, weight_store.C.memcmp

    @staticmethod
    def madvise(*_: int) -> int:
        ctypes.set_errno(errno.ENOMEM)
        return -1
