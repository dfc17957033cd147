"""BlockPool: which KV blocks of a worker are free. It holds numbers only; the engine has the memory."""

from collections import Counter
from collections.abc import Sequence

from batcher.scheduling.prefix_cache import PrefixCache


class BlockPool:
    """Blocks 1 to `num_blocks` of one worker. Block 0 is the engine's scratch and is never allocated.

    Attributes:
        free: blocks that hold nothing.
        cache: what complete blocks hold. Those of them that no row has are allocated when no other is free.
        others: of a block that several rows have: how many besides the first.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.free = list(range(num_blocks, 0, -1))
        self.cache = PrefixCache()
        self.others: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        """Number of blocks that no row has."""
        return len(self.free) + len(self.cache.idle)

    def can_allocate(self, count: int, beside: Sequence[int] = ()) -> bool:
        """Whether `count` blocks can be allocated once the cached blocks `beside` are shared."""
        idle = self.cache.idle
        return count <= len(self.free) + len(idle) - sum(block in idle for block in beside)

    def allocate(self, count: int) -> list[int]:
        """Return `count` blocks: the most recently released first, then those cached that are least recently
        used. The caller checks `can_allocate`.
        """
        if count == 0:
            return []
        blocks = self.free[-count:][::-1]
        del self.free[-count:]
        while len(blocks) < count:
            blocks.append(self.cache.evict())
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """Give cached blocks to one more row."""
        for block in blocks:
            if block in self.cache.idle:
                del self.cache.idle[block]
            else:
                self.others[block] = self.others.get(block, 0) + 1

    def reserve(self, rows: Counter[int]) -> None:
        """Take certain blocks, which are in use, each by so many rows.

        Raises ValueError, and takes none, if one is not free.
        """
        free = set(self.free)
        if not rows.keys() <= free:
            raise ValueError("blocks are in use twice, or there are none with such numbers")
        self.free = [block for block in self.free if block not in rows]
        self.others |= {block: count - 1 for block, count in rows.items() if count > 1}

    def release(self, blocks: Sequence[int], names: Sequence[bytes] = ()) -> None:
        """A row has these blocks no more. `names` are those of what the first of them hold."""
        cache = self.cache
        if not (names or cache.names or self.others):
            self.free.extend(reversed(blocks))
            return
        for i in range(len(blocks) - 1, -1, -1):
            block = blocks[i]
            if others := self.others.pop(block, 0):
                if others > 1:
                    self.others[block] = others - 1
            elif block in cache.names:
                cache.idle[block] = None
            else:
                self.free.append(block)
            if i < len(names):
                cache.touch(names[i])
