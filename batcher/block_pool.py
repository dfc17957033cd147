"""Which KV blocks of a worker are free. Numbers only: the memory itself is the engine's."""


class BlockPool:
    """Blocks 1 to `num_blocks` of one worker. Block 0 is the device's scratch and belongs to nobody."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.free = list(range(num_blocks, 0, -1))

    @property
    def num_free(self) -> int:
        return len(self.free)

    def can_take(self, count: int) -> bool:
        return count <= len(self.free)

    def take(self, count: int) -> list[int]:
        """`count` blocks, the most recently released first. The caller asked `can_take` before."""
        if count == 0:
            return []
        taken = self.free[-count:][::-1]
        del self.free[-count:]
        return taken

    def put_back(self, blocks: list[int]) -> None:
        """Blocks that the engine reported released."""
        self.free.extend(reversed(blocks))
