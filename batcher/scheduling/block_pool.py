"""BlockPool: which KV blocks of a worker are free. It holds numbers only; the engine has the memory."""

from collections.abc import Iterable


class BlockPool:
    """Blocks 1 to `num_blocks` of one worker. Block 0 is the engine's scratch and is never allocated."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.free = list(range(num_blocks, 0, -1))

    @property
    def num_free(self) -> int:
        return len(self.free)

    def can_allocate(self, count: int) -> bool:
        return count <= len(self.free)

    def allocate(self, count: int) -> list[int]:
        """Return `count` blocks, the most recently released first. The caller checks `can_allocate`."""
        if count == 0:
            return []
        blocks = self.free[-count:][::-1]
        del self.free[-count:]
        return blocks

    def reserve(self, blocks: Iterable[int]) -> None:
        """Take certain blocks, which are in use. Raises ValueError, and takes none, if one is not free."""
        taken = list(blocks)
        free = set(self.free)
        reserved = set(taken)
        if len(reserved) < len(taken) or not reserved <= free:
            raise ValueError("blocks are in use twice, or there are none with such numbers")
        self.free = [block for block in self.free if block not in reserved]

    def release(self, blocks: list[int]) -> None:
        self.free.extend(reversed(blocks))
