"""Memory in large pages: tensors of their own, and what the system was asked for."""

import re
from pathlib import Path

import pytest
import torch

from gpu_worker.engine.cpu import large_pages
from gpu_worker.engine.cpu.large_pages import LargePages


def test_tensors_are_each_their_own() -> None:
    some, counts = LargePages(), (1, 3, 64, 1000, large_pages.REGION_BYTES // 2, 7)
    taken = [some.take(count, dtype) for count in counts for dtype in (torch.float32, torch.bfloat16)]
    for number, tensor in enumerate(taken):
        assert not tensor.any() and tensor.data_ptr() % large_pages.ALIGNED_BYTES == 0
        tensor.fill_(number)
    assert [len(tensor) for tensor in taken[::2]] == list(counts)
    assert all((tensor == number).all() for number, tensor in enumerate(taken))


def test_they_outlive_who_hands_them_out() -> None:
    tensor = LargePages().take(10**6, torch.float32).fill_(1)
    assert tensor.sum() == 10**6


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").is_dir(), reason="the system has no large pages"
)
def test_large_pages_are_asked_for() -> None:
    tensor = LargePages().take(10**6, torch.float32)
    assert "hg" in flags_of(tensor.data_ptr())


def flags_of(address: int) -> list[str]:
    """Of the mapping that holds the address (man 5 proc, smaps)."""
    for mapping in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())[1:]:
        begin, end = (int(word, 16) for word in mapping.split()[0].split("-"))
        if begin <= address < end:
            return mapping.rpartition("VmFlags:")[2].split()
    raise AssertionError("no such mapping")
