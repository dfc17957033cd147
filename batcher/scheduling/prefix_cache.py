"""PrefixCache: which KV blocks of a worker hold what, by name (common/block_hashes.py)."""

from collections import OrderedDict
from collections.abc import Iterable


class PrefixCache:
    """Blocks whose tokens are all computed, by name.

    A block's name says what it and all blocks before it hold, so a prefix is found block by block. The blocks
    of a row become idle from its last to its first, and every use of a block is a use of those before it: so
    the one that has been idle for the longest has no other behind it.

    Attributes:
        blocks: block by name.
        names: name by block.
        idle: blocks that no row has, the least recently used first.
    """

    def __init__(self) -> None:
        self.blocks: dict[bytes, int] = {}
        self.names: dict[int, bytes] = {}
        self.idle: OrderedDict[int, None] = OrderedDict()

    def find(self, names: Iterable[bytes]) -> list[int]:
        """Return the blocks of the longest prefix that is here."""
        found = []
        for name in names:
            if (block := self.blocks.get(name)) is None:
                break
            found.append(block)
        return found

    def add(self, name: bytes, block: int) -> None:
        """Name a block that a row has, unless another one has the name, or it has one."""
        if name not in self.blocks and block not in self.names:
            self.blocks[name] = block
            self.names[block] = name

    def touch(self, name: bytes) -> None:
        """Mark the block of this name, if there is one, as used."""
        block = self.blocks.get(name, 0)
        if block in self.idle:
            self.idle.move_to_end(block)

    def evict(self) -> int:
        """Forget the least recently used block that no row has. Return it."""
        block, _ = self.idle.popitem(last=False)
        del self.blocks[self.names.pop(block)]
        return block
