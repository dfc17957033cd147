"""BlockPool: which KV blocks of a worker are free. It holds numbers only; the engine has the memory."""


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

    def release(self, blocks: list[int]) -> None:
        self.free.extend(reversed(blocks))
