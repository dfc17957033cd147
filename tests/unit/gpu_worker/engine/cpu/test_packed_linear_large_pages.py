"""Memory in large pages: tensors do not overlap, and the system is advised to use large pages."""

import os
import re
import sys
from pathlib import Path

import pytest
import torch

from gpu_worker.engine.cpu import packed_linear
from gpu_worker.engine.cpu.packed_linear import LargePages
from gpu_worker.engine.cpu.weight_store import HUGE_BYTES, WeightStore


def test_tensors_do_not_overlap() -> None:
    pages, counts = LargePages(), (1, 3, 64, 1000, packed_linear.REGION_BYTES // 2, 7)
    tensors = [pages.allocate(count, dtype) for count in counts for dtype in (torch.float32, torch.bfloat16)]
    for number, tensor in enumerate(tensors):
        assert not tensor.any() and tensor.data_ptr() % packed_linear.ALIGNED_BYTES == 0
        tensor.fill_(number)
    assert [len(tensor) for tensor in tensors[::2]] == list(counts)
    assert all((tensor == number).all() for number, tensor in enumerate(tensors))


def test_tensors_outlive_their_allocator() -> None:
    tensor = LargePages().allocate(10**6, torch.float32).fill_(1)
    assert tensor.sum() == 10**6


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").is_dir(), reason="the system has no large pages"
)
def test_the_system_is_advised_to_use_large_pages() -> None:
    tensor = LargePages().allocate(10**6, torch.float32)
    assert "hg" in flags_of(tensor.data_ptr())


@pytest.mark.skipif(sys.platform != "linux", reason="memory without a name is Linux's")
def test_tensors_of_several_regions_are_shared() -> None:
    """Those of two engines, of which the second finds those of the first."""
    store = WeightStore(os.memfd_create("weights"))
    counts = (1000, packed_linear.REGION_BYTES - 10**6, packed_linear.REGION_BYTES + 10, 10**6)
    for _ in range(2):
        pages = LargePages()
        tensors = [pages.allocate(count, torch.uint8).fill_(number) for number, count in enumerate(counts)]
        pages.share(store)
        assert all((tensor == number).all() for number, tensor in enumerate(tensors))
        assert [len(tensor) for tensor in tensors] == list(counts)
        if "sh" not in flags_of(tensors[0].data_ptr()):
            pytest.skip("shared memory has no large pages here")
    used = sum(-(-size // HUGE_BYTES) * HUGE_BYTES for _, size in store.segments())
    assert os.fstat(store.handle).st_size == HUGE_BYTES + used < 1.2 * (HUGE_BYTES + sum(counts))
    os.close(store.handle)


def flags_of(address: int) -> list[str]:
    """Of the mapping that holds the address (man 5 proc, smaps)."""
    for mapping in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())[1:]:
        begin, end = (int(word, 16) for word in mapping.split()[0].split("-"))
        if begin <= address < end:
            return mapping.rpartition("VmFlags:")[2].split()
    raise AssertionError("no such mapping")
