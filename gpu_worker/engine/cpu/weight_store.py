"""Weight store: packed weights that the engines of one launcher share, in memory that has no name.

An engine packs its weights into memory of its own, and then gives it to the store. If the store has the same
bytes, the engine maps them in place of its own; otherwise it adds its own and maps those. So there is no key
that could be wrong, and no engine waits for another. The launcher makes the store, and each engine inherits
it: the system frees it when the last of them has ended, however that happens.

A store begins with the number of its segments and the size of each. A segment counts once its size is
written, so an engine that ends while it adds one leaves nothing that another would use.
"""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Iterator

import numpy as np

from common.process.launch import shared_handles

HUGE_BYTES = 2**21
"""Size and alignment of large pages; segments are aligned like that."""
MAX_SEGMENTS = HUGE_BYTES // 8 - 1
MADV_COLLAPSE = 25
"""Of madvise(2), since Linux 6.1: use large pages now, also where shared memory gets none by itself."""
WRITE_BYTES = 2**26

C = ctypes.CDLL(None, use_errno=True)
C.mmap.restype = ctypes.c_void_p
C.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
C.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
C.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
MAP_FIXED = 0x10  # Python does not name it


class WeightStore:
    """The store behind an inherited file descriptor."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    @classmethod
    def inherited(cls) -> "WeightStore | None":
        """Return the launcher's store; None if there is none."""
        handles = shared_handles(os.environ)
        return cls(*handles) if handles else None

    def share(self, address: int, num_bytes: int) -> None:
        """Put shared memory with the same bytes in place of private memory, which is not written any more.

        `address` and `num_bytes` are multiples of HUGE_BYTES. Raises OSError, and the memory stays as it is,
        if memory is short, or if the kernel has no large pages for shared memory: products would take a tenth
        longer. A kernel that has none left just now has none for private memory either.
        """
        with self.locked():
            self.begin()
            offset = self.find(address, num_bytes)
            if offset is None:
                offset = self.add(address, num_bytes)
        map_shared(self.handle, offset, num_bytes, address)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the store against the other processes; the system unlocks it when this one ends."""
        fcntl.lockf(self.handle, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self.handle, fcntl.LOCK_UN)

    def begin(self) -> None:
        """Write the header, if it is not there. Raises OSError if the kernel has no large pages for it."""
        if os.fstat(self.handle).st_size == 0:
            os.ftruncate(self.handle, HUGE_BYTES)
            write(self.handle, bytes(8), 0)
        with private_memory(HUGE_BYTES) as memory:
            if not map_shared(self.handle, 0, HUGE_BYTES, aligned_address(memory)):
                raise OSError("shared memory has no large pages")

    def segments(self) -> list[tuple[int, int]]:
        """Return offset and size of each segment."""
        header = memoryview(os.pread(self.handle, HUGE_BYTES, 0)).cast("Q")
        offset, found = HUGE_BYTES, []
        for size in header[1 : 1 + header[0]]:
            found.append((offset, size))
            offset += size
        return found

    def find(self, address: int, num_bytes: int) -> int | None:
        """Return the offset of the segment with the same bytes as the memory."""
        for offset, size in self.segments():
            if size == num_bytes and self.is_equal(offset, address, num_bytes):
                return offset
        return None

    def is_equal(self, offset: int, address: int, num_bytes: int) -> bool:
        """Whether a segment has the bytes of the memory. It is read, not mapped: Python's mmap has a copy of
        the handle, and closing any handle of a file ends the process's lock on it.
        """
        part = np.empty(min(num_bytes, WRITE_BYTES), np.uint8)
        for start in range(0, num_bytes, WRITE_BYTES):
            there = part[: num_bytes - start]
            if os.preadv(self.handle, [there.data], offset + start) < len(there):
                return False
            if C.memcmp(there.ctypes.data, address + start, len(there)):
                return False
        return True

    def add(self, address: int, num_bytes: int) -> int:
        """Append the memory as a segment. Return its offset."""
        segments = self.segments()
        if len(segments) >= MAX_SEGMENTS:
            raise OSError("the weight store is full")
        offset = sum(segments[-1]) if segments else HUGE_BYTES
        os.ftruncate(self.handle, offset + num_bytes)
        source = memoryview((ctypes.c_char * num_bytes).from_address(address)).cast("B")
        for start in range(0, num_bytes, WRITE_BYTES):
            write(self.handle, source[start : start + WRITE_BYTES], offset + start)
        write(self.handle, num_bytes.to_bytes(8, "little"), 8 * (len(segments) + 1))
        write(self.handle, (len(segments) + 1).to_bytes(8, "little"), 0)
        return offset


def write(handle: int, data: bytes | memoryview, offset: int) -> None:
    """Raises OSError if not all is written."""
    if os.pwrite(handle, data, offset) < len(data):
        raise OSError("memory for shared weights is short")


def private_memory(num_bytes: int) -> mmap.mmap:
    """Memory of this process alone, which the system provides as it is written: `num_bytes` from an
    `aligned_address` on.
    """
    return mmap.mmap(-1, num_bytes + HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def aligned_address(memory: mmap.mmap) -> int:
    """Return the first multiple of HUGE_BYTES in it."""
    first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    return -(-first // HUGE_BYTES) * HUGE_BYTES


def map_shared(handle: int, offset: int, num_bytes: int, address: int) -> bool:
    """Map a part of a file for reading, in place of the memory at an address. Return whether the kernel has
    large pages for it. Raises OSError.
    """
    if C.mmap(address, num_bytes, mmap.PROT_READ, mmap.MAP_SHARED | MAP_FIXED, handle, offset) != address:
        raise OSError(ctypes.get_errno(), "weights cannot be mapped")
    return C.madvise(address, num_bytes, MADV_COLLAPSE) == 0 or ctypes.get_errno() != errno.EINVAL
