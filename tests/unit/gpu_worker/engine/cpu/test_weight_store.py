"""Weight store: equal bytes are there once, different ones stay apart, and an engine that ends leaves nothing
half written.
"""

import ctypes
import fcntl
import os
import signal
import sys
from collections.abc import Iterator

import pytest

from gpu_worker.engine.cpu import weight_store
from gpu_worker.engine.cpu.weight_store import HUGE_BYTES, WeightStore, aligned_address, private_memory

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
        """Where in the store this memory is mapped from; None if it is private."""
        with open("/proc/self/maps") as maps:
            for words in map(str.split, maps):
                first, end = (int(word, 16) for word in words[0].split("-"))
                if first <= self.address < end:
                    return int(words[2], 16) + self.address - first if "weights" in words[-2] else None
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


def test_equal_bytes_are_there_once(store: WeightStore) -> None:
    first, second, other = PrivateMemory(b"ab"), PrivateMemory(b"ab"), PrivateMemory(b"ac")
    for memory in (first, other, second):
        assert memory.offset is None
        store.share(memory.address, NUM_BYTES)
    assert first.offset == second.offset and other.offset not in (None, first.offset)
    assert first.content == second.content == b"ab" * HUGE_BYTES and other.content == b"ac" * HUGE_BYTES
    assert os.fstat(store.handle).st_size == HUGE_BYTES + 2 * NUM_BYTES


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


def test_weights_stay_private_where_memory_is_short(
    store: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = PrivateMemory(b"ab")
    monkeypatch.setattr(os, "pwrite", lambda *_: 0)
    with pytest.raises(OSError, match="memory for shared weights is short"):
        store.share(memory.address, NUM_BYTES)
    assert memory.offset is None and memory.content == b"ab" * HUGE_BYTES
